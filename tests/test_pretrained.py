"""Networks as folders: saved, loaded, downloaded, uploaded. The hub is a folder here."""

import shutil
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
import torch

from tests.data.published_files import FASHION_MNIST
from tests.small_run import META
from tests.test_contract import SMALL
from tread_zoo import (
    create,
    create_backbone,
    list_backbones,
    load_pretrained,
    push_to_hub,
    save_pretrained,
)
from tread_zoo.data import digits
from tread_zoo.data.builtin import npz
from tread_zoo.diffusion import FlowMatching
from tread_zoo.evaluation import held_out
from tread_zoo.factory import add_routing, describe_backbone
from tread_zoo.runs.checkpoint import save_checkpoint

CASES = {
    **{name: (name, {"num_classes": 3, **sizes}) for name, sizes in SMALL.items()},
    "fused": ("dit_tiny", {"num_classes": 3, **SMALL["dit_tiny"]}),
    "fused with a token": ("dit_tiny", {"num_classes": 3, **SMALL["dit_tiny"]}),
    "contexts": (
        "uvit_tiny",
        {"num_classes": 0, "context_length": 3, "context_size": 5, **SMALL["uvit_tiny"]},
    ),
    "wide": ("dit_tiny", {"num_classes": 0, "input_size": (4, 8), **SMALL["dit_tiny"]}),
}


def random_backbone(case):
    """Return a network with random weights in every tensor; fresh ones are zero in many."""
    name, options = CASES[case]
    backbone = create_backbone(name, **{"input_size": 8, "in_channels": 1, **options})
    if case.startswith("fused"):
        absent = "token" if "token" in case else "dense"
        add_routing(backbone, create("routing", "sprint", start=1, end=3, absent=absent))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return backbone.eval()


def output(backbone):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 1, *backbone.input_size, generator=generator)
    y = torch.tensor([0, 2]) if backbone.num_classes else None
    if backbone.context_size:
        y = torch.randn(2, backbone.context_length, backbone.context_size, generator=generator)
    with torch.no_grad():
        return backbone(x, torch.tensor([0.2, 0.7]), y)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_network_computes_the_same(tmp_path, case):
    backbone = random_backbone(case)
    save_pretrained(backbone, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    loaded = load_pretrained(tmp_path)
    assert type(loaded) is type(backbone)
    assert output(backbone).abs().sum() > 0
    assert torch.equal(output(loaded), output(backbone))


ROOT = Path(__file__).parents[1]
COMMITTED = sorted((ROOT / "examples" / "checkpoints").iterdir())  # these come with a wheel, too
MORE = sorted((ROOT / "examples" / "more_checkpoints").iterdir())


clothes = cache(lambda: npz(str(FASHION_MNIST), pad_to=32))


@pytest.mark.parametrize("folder", COMMITTED + MORE, ids=lambda folder: folder.name)
def test_a_committed_network_has_learnt_its_images(folder, monkeypatch):
    monkeypatch.setattr(held_out, "HELD_OUT_IMAGES", 64)
    backbone, of_clothes = load_pretrained(folder), folder.name.endswith("_fashion_mnist")
    assert (folder / "model.safetensors").stat().st_size <= 2**19 * (4 if of_clothes else 1.05)
    if of_clothes and not FASHION_MNIST.exists():
        pytest.skip(f"{FASHION_MNIST} is absent")
    data = clothes() if of_clothes else digits()
    loss, _ = held_out.held_out_loss(backbone, FlowMatching(), data, seed=0, precision="fp32")
    assert loss < (0.25 if of_clothes else 0.5)  # of an untrained one: 1.6


def test_a_run_s_newest_whole_checkpoint_is_taken(tmp_path, caplog):
    """Of a file that is damaged nothing is loaded; what is not loaded may be."""
    networks = [random_backbone("dit_tiny") for _ in range(2)]
    with torch.no_grad():
        for parameter in networks[1].parameters():
            parameter += 1
    paths = []
    for step, network in enumerate(networks, 1):
        parts = {"ema": network.state_dict(), "model": {"w": torch.zeros(4)}}
        meta = {**META, "step": step, "backbone": describe_backbone(network)}
        paths.append(save_checkpoint(tmp_path, parts, meta, 9))
    (tmp_path / "checkpoints" / "step_backup").mkdir()
    (paths[1] / "model.safetensors").write_bytes(b"damaged")
    assert torch.equal(output(load_pretrained(tmp_path)), output(networks[1]))
    weights = paths[1] / "ema.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert torch.equal(output(load_pretrained(tmp_path)), output(networks[0]))
    assert "step_00000002 is damaged" in caplog.text
    with pytest.raises(ValueError, match="step_00000002 is damaged"):
        load_pretrained(paths[1])


def test_each_architecture_has_a_committed_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {name.removesuffix("_tiny") for name in SMALL} - {"sit"}
    shipped = list_backbones(pretrained=True)
    of_clothes = {f"dit{kind}_fashion_mnist" for kind in ("", "_dense", "_6_blocks")}
    assert of_clothes | names == {*shipped, "kda", "linear_dit"}
    assert names < {*shipped, *(folder.name for folder in MORE)}
    assert list_backbones("mamba*", pretrained=True) == ["mamba", "mamba2"]
    assert load_pretrained("dit").name == "dit_tiny"
    assert torch.equal(output(load_pretrained("dit")), output(load_pretrained(COMMITTED[0])))


def test_to_the_hub_and_back(tmp_path, monkeypatch):
    hub = tmp_path / "hub"

    class Api:
        def create_repo(self, repo, **options):
            return f"https://huggingface.co/{repo}"

        def upload_folder(self, repo_id, folder_path):
            shutil.copytree(folder_path, hub / repo_id)

    def snapshot_download(name, **options):
        if not (hub / name).exists():
            raise huggingface_hub.errors.LocalEntryNotFoundError("no such\nrepository")
        return str(hub / name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    backbone = random_backbone("dit_tiny")
    assert push_to_hub(backbone, "someone/digits").endswith("/someone/digits")
    loaded = load_pretrained("someone/digits")
    assert torch.equal(output(loaded), output(backbone))
    with pytest.raises(OSError, match="someone/nothing"):
        load_pretrained("someone/nothing")


def test_a_folder_of_a_run_is_not_overwritten(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="folder of a run"):
        save_pretrained(random_backbone("dit_tiny"), tmp_path)
