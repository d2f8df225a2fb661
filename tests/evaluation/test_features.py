"""Extractors: the package's own, a user's, and Inception and DINOv2 from files. Their weights are
random here: the tests show which network runs on which input."""

import json

import pytest
import torch
from torch import nn

from tests.data.published_files import FASHION_MNIST
from tests.evaluation.tiny import random_images, write_npz
from tests.scripts.test_command_line import call
from tread_zoo.data import digits
from tread_zoo.data.builtin import npz
from tread_zoo.evaluation import score
from tread_zoo.evaluation.features import (
    DIGITS_WEIGHTS,
    INCEPTION_URL,
    ClassifierFeatures,
    find_extractor,
    load_features,
    save_features,
)

HUBCONF = """
import torch
from torch import nn

dependencies = ["torch"]

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))

    def forward_features(self, x):  # [B, 3, 224, 224]
        patches = x[:, :, 7::14, 7::14].flatten(2).mT
        halves = x[..., :112].mean((2, 3)), x[..., 112:].mean((2, 3))
        first, second = (half @ w.T for half, w in zip(halves, (self.weight, self.weight.flip(0))))
        return {"x_norm_clstoken": first + second, "x_norm_patchtokens": patches}

def dinov2_vitl14(pretrained=True):
    assert not pretrained, "this would be a download"
    return Network()
"""
CPU = torch.device("cpu")


def test_the_shipped_network_is_small_and_knows_digits():
    network, held_out = load_features(), digits().held_out
    features = network(held_out.images)
    assert features["pooled"].shape == (359, 64)
    assert (features["logits"].argmax(1) == held_out.labels).double().mean() > 0.99
    assert sum(parameter.numel() for parameter in network.parameters()) <= 60_000
    assert DIGITS_WEIGHTS.stat().st_size <= 300_000
    assert not any(parameter.requires_grad for parameter in network.parameters())
    assert (network(digits().train.images)["pooled"].std(dim=0) > 1e-3).all(), "a dead feature"


def test_the_shipped_network_of_clothes_knows_them():
    if not FASHION_MNIST.exists():
        pytest.skip(f"{FASHION_MNIST} is absent")
    held_out = npz(str(FASHION_MNIST), pad_to=32).held_out
    images, labels = held_out.images[::5], held_out.labels[::5]
    found = find_extractor("fashion-cnn-128").load(["logits", "pooled"], CPU)(images)
    assert found["pooled"].shape == (2000, 128)
    assert (found["logits"].argmax(1) == labels).double().mean() > 0.8
    assert (found["pooled"].std(dim=0) > 1e-3).all(), "a dead feature"


def test_what_was_saved_is_loaded(tmp_path):
    torch.manual_seed(0)
    sizes = {"image_size": (8, 12), "channels": 3, "num_classes": 4}
    network = ClassifierFeatures(**sizes, num_features=16)
    images = torch.randint(0, 256, (5, 3, 8, 12), dtype=torch.uint8)
    save_features(network, tmp_path / "own.safetensors", "a test's")
    state = torch.get_rng_state()
    loaded = load_features(tmp_path / "own.safetensors")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(loaded(images)["logits"], network(images)["logits"])
    assert [p.name for p in tmp_path.iterdir()] == ["own.safetensors"]
    extractor = find_extractor(str(tmp_path / "own.safetensors"))
    assert extractor.sizes == {"pooled": 16, "logits": 4}
    assert extractor.label.startswith("own@")


def test_files_that_are_not_there_are_named_and_nothing_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)
    for name, words in {
        "inception-v3-compat": "hub/checkpoints/.*https://", "dinov2-vit-s-14": "vits14_pretrain",
        "x.safetensors": "x.safetensors",
    }.items():  # fmt: skip
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            find_extractor(name)
    with pytest.raises(ValueError, match="does not exist"):
        find_extractor("inception-v3-compat", inception_weights="there.pth")
    assert list(tmp_path.iterdir()) == []


def test_dinov2_runs_from_the_hub_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    (tmp_path / "checkpoints").mkdir()
    torch.save({"weight": weight}, tmp_path / "checkpoints" / "dinov2_vitl14_pretrain.pth")
    with pytest.raises(ValueError, match="git clone https://github"):
        find_extractor("dinov2-vit-l-14").load(["pooled"], CPU)
    (tmp_path / "facebookresearch_dinov2_main").mkdir()
    (tmp_path / "facebookresearch_dinov2_main" / "hubconf.py").write_text(HUBCONF)
    grey = random_images(10)
    record = score(grey, grey, ["kid"], extractor="dinov2-vit-l-14")
    assert "to 224x224" in record["protocol"]["resize"]
    network = find_extractor("dinov2-vit-l-14").load(["pooled", "feature_map"], CPU)
    # normalised white in every pixel, so the mean of each half is the pixel itself
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    expected = weight @ white + weight.flip(0) @ white
    pooled = network(torch.full((2, 1, 8, 8), 255, dtype=torch.uint8))["pooled"]
    torch.testing.assert_close(pooled, expected.expand(2, 6), rtol=1e-4, atol=1e-4)
    corner = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    corner[:, 0, :16, :16] = 255  # red
    maps = network(corner)["feature_map"]
    assert maps.shape == (1, 3, 16, 16)
    red = maps[0, 0] > maps[0, 2]
    assert torch.equal(red, (torch.arange(16) < 8).outer(torch.arange(16) < 8))


def write_random_inception(file):
    """Write random weights of a size that keeps signals alive, in a file as the real ones come."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Random(FeatureExtractorInceptionV3):
        def load_state_dict(self, *args, **keywords):
            """Keep the random weights."""

    torch.save({}, file)  # without a file it would be downloaded
    network = Random("x", ["2048"], feature_extractor_weights_path=str(file))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    torch.save(network.state_dict(), file)


@pytest.mark.slow
def test_inception_gives_what_torch_fidelity_gives_and_the_spatial_features(tmp_path):
    """Spatial features by hand: ADM's mixed_6/conv is the 1x1 branch of the 7th block after ReLU;
    its first 7 channels in the order [H, W, 7]."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from torch_fidelity.interpolate_compat_tensorflow import (
        interpolate_bilinear_2d_like_tensorflow1x as resize,
    )

    file = tmp_path / INCEPTION_URL.rpartition("/")[2]
    torch.manual_seed(0)
    write_random_inception(file)
    state = torch.get_rng_state()
    extractor = find_extractor("inception-v3-compat", inception_weights=str(tmp_path))
    grey = random_images(3)
    found = extractor.load(["pooled", "spatial", "logits"], CPU)(grey)
    assert torch.equal(torch.get_rng_state(), state)

    network = FeatureExtractorInceptionV3(
        "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=str(file)
    )
    blocks = list(network.children())
    start = [type(block).__name__ for block in blocks].index("InceptionA")
    with torch.no_grad():
        features, logits = network(grey.expand(-1, 3, -1, -1))
        x = grey.expand(-1, 3, -1, -1).float()
        x = (resize(x, size=(299, 299), align_corners=False) - 128) / 128
        for block in blocks[: start + 6]:  # mixed, mixed_1 … mixed_5
            x = block(x)
        mixed_6 = blocks[start + 6].branch1x1
        convolved = mixed_6.bn(mixed_6.conv(x))
    assert torch.equal(found["pooled"], features)
    assert torch.equal(found["logits"], logits)
    assert {name: values.shape[1] for name, values in found.items()} == extractor.sizes
    expected = convolved.clamp(min=0)[:, :7].permute(0, 2, 3, 1)  # [B, 17, 17, 7]
    assert expected.std() > 1e-3
    assert torch.equal(found["spatial"].view(3, 17, 17, 7), expected)
    maps = extractor.load(["feature_map"], CPU)(grey)["feature_map"]  # mixed_7
    with torch.no_grad():
        assert torch.equal(maps, blocks[start + 7](blocks[start + 6](x)))
    only = extractor.load(["spatial"], CPU)(grey)
    assert torch.equal(only["spatial"], found["spatial"])


@pytest.mark.slow
def test_the_scripts_make_features_and_a_reference_that_images_are_scored_with(tmp_path):
    said = call("make_features.py", "out=f.safetensors", "num_steps=60", "device=cpu", cwd=tmp_path)
    assert float(said.split("held-out accuracy ")[1].split()[0]) > 0.8
    given = ["evaluation.extractor=f.safetensors", "device=cpu"]
    call("make_reference.py", "out=r.npz", *given, cwd=tmp_path)
    held_out = digits().held_out
    write_npz(tmp_path / "s.npz", held_out.images, held_out.labels)
    given += ["samples=s.npz", "evaluation.metrics=[fid]"]
    values = []
    for name, more in (("a", ["evaluation.reference=r.npz"]), ("b", [])):
        call("evaluate.py", *given, *more, "data=digits", f"out={name}.json", cwd=tmp_path)
        values.append(json.loads((tmp_path / f"{name}.json").read_text())["values"])
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert values[0].keys() == {"label_accuracy", "fid"}
    assert values[0]["label_accuracy"] > 0.8


@pytest.mark.slow
def test_any_network_is_an_extractor_once_it_is_exported(tmp_path):
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 5)

        def forward(self, images):
            return self.linear(images.float().mean(dim=(2, 3)) / 255)

    network, file = Network(), tmp_path / "mine.pt2"
    example = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(network, (example,), dynamic_shapes=(batch,)), file)
    images = random_images(30, 0, 3)
    features = find_extractor(str(file)).load(["pooled"], CPU)(images)["pooled"]
    torch.testing.assert_close(features, network(images).detach())
    record = score(images, random_images(40, 1, 3), ["fid"], extractor=str(file))
    assert record["values"]["fid"] > 0
    assert record["protocol"]["extractor"].startswith("mine@")
