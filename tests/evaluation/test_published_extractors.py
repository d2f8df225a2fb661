"""Inception and DINOv2 as they are found on the disk. Their weights here are random or invented, so
the values mean nothing: what is shown is which network runs, on what, and what is refused."""

import pytest
import torch

from tread_zoo.evaluation import score
from tread_zoo.evaluation.extractors import (
    FEATURES,
    LOGITS,
    SPATIAL,
    file_sha256,
    find_weights,
    open_extractor,
)
from tread_zoo.evaluation.random_inception import write_random_inception

HUBCONF = """
import torch
from torch import nn

dependencies = ["torch"]

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 3))

    def forward(self, x):  # [B, 3, 224, 224]
        assert x.shape[1:] == (3, 224, 224), x.shape
        half = torch.cat([x[..., :112].mean((2, 3)), x[..., 112:].mean((2, 3))], dim=1)
        return half[:, :3] @ self.weight.T + half[:, 3:] @ self.weight.flip(0).T

def dinov2_vitl14(pretrained=True):
    assert not pretrained, "this would be a download"
    return Network()
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder as torch's hub leaves it: code and weights."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    code = tmp_path / "hub" / "facebookresearch_dinov2_main"
    code.mkdir(parents=True)
    (code / "hubconf.py").write_text(HUBCONF)
    (tmp_path / "hub" / "checkpoints").mkdir()
    weight = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    file = tmp_path / "hub" / "checkpoints" / "dinov2_vitl14_pretrain.pth"
    torch.save({"weight": weight}, file)
    return file


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)


def test_dinov2_runs_from_the_hub_folder(hub, monkeypatch):
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", None)
    a, b = images(9, 1), images(8, 2) // 2
    metrics = ["fd_dinov2", "kid", "precision"]
    record = score(a, b, extractor="dinov2-vit-l-14", metrics=metrics, allow_few_images=True)
    assert record["extractor"] == f"dinov2-vit-l-14@{file_sha256(hub)[:8]}"
    assert "to 224x224" in record["resize"]
    assert record["values"].keys() == {"fd_dinov2", "kid", "kid_std", "precision"}
    again = score(
        a, b, extractor="dinov2-vit-l-14", metrics=metrics, dinov2_weights=str(hub),
        allow_few_images=True,
    )  # fmt: skip
    assert again == record
    weights = find_weights("dinov2-vit-l-14")
    found = open_extractor(weights, [FEATURES], torch.device("cpu"))(a.fill_(255))[FEATURES]
    # white, normalised, in every pixel: the mean of each half is the pixel itself
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    weight = torch.load(hub)["weight"]
    expected = weight @ white + weight.flip(0) @ white
    torch.testing.assert_close(found, expected.expand(9, 6), rtol=1e-4, atol=1e-4)


def test_dinov2_says_what_is_missing_and_never_downloads(hub, tmp_path):
    some = images(4, 0)
    ask = {"extractor": "dinov2-vit-l-14", "metrics": ["fd_dinov2"], "allow_few_images": True}
    with pytest.raises(ValueError, match=r"here.pth' does not exist.*get it from https://dl.fb"):
        score(some, some, **ask, dinov2_weights="here.pth")
    with pytest.raises(ValueError, match=r"dinov2_vits14_pretrain.pth, and .*set dinov2_weights"):
        score(some, some, **{**ask, "extractor": "dinov2-vit-s-14"})
    torch.save({"other": torch.zeros(1)}, hub)
    with pytest.raises(ValueError, match=r"pretrain.pth' does not load into the network of"):
        score(some, some, **ask)
    hub.unlink()
    (tmp_path / "hub" / "facebookresearch_dinov2_main" / "hubconf.py").unlink()
    with pytest.raises(ValueError, match=r"needs the code of DINOv2.*: git clone https://github"):
        score(some, some, **ask)
    with pytest.raises(ValueError, match=r"dinov2_weights='x' is of no use with extractor='digits"):
        score(some, some, dinov2_weights="x")


@pytest.mark.slow
def test_inception_gives_what_torch_fidelity_gives_and_the_spatial_features(tmp_path):
    """The spatial ones by hand: ADM's mixed_6/conv is the 1x1 branch of the 7th block, after ReLU,
    its 7 first channels in the order [H, W, 7]."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    from torch_fidelity.interpolate_compat_tensorflow import (
        interpolate_bilinear_2d_like_tensorflow1x as resize,
    )

    file = tmp_path / "weights.pth"
    write_random_inception(file)
    state = torch.get_rng_state()
    weights = find_weights("inception-v3-compat", inception_weights=str(file))
    extractor = open_extractor(weights, [FEATURES, SPATIAL, LOGITS], torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    grey = images(3, 0)[:, :1]
    found = extractor(grey)

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
    assert torch.equal(found[FEATURES], features)
    assert torch.equal(found[LOGITS], logits)
    assert found[SPATIAL].shape == (3, 2023)
    assert weights.sizes == {name: found[name].shape[1] for name in (FEATURES, SPATIAL)}
    expected = convolved.clamp(min=0)[:, :7].permute(0, 2, 3, 1)  # [B, 17, 17, 7]
    assert expected.std() > 1e-3
    assert torch.equal(found[SPATIAL].view(3, 17, 17, 7), expected)
    only = open_extractor(weights, [SPATIAL], torch.device("cpu"))(grey)
    assert torch.equal(only[SPATIAL], found[SPATIAL])
