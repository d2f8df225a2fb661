"""Every recipe composes into a run that can be built, and its head says what is true."""

import re

import numpy as np
import pytest
import torch

from tests.small_run import CONFIGS, full_settings, parts_of
from tread_zoo import create_backbone
from tread_zoo.training import train

RECIPES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
IMAGENET = [name for name in RECIPES if name.startswith("imagenet256")]
TINY = ["backbone.hidden_size=16", "training.num_steps=2", "training.batch_size=2",
        "training.num_workers=0", "training.precision=fp32", "sampler.num_steps=2",
        "evaluation.num_images=2", "tracker=local", "device=cpu"]  # fmt: skip


def head_of(recipe):
    text = (CONFIGS / "experiment" / f"{recipe}.yaml").read_text()
    return text[: text.index("defaults:")]


def test_there_is_a_recipe_for_each_architecture_size_and_kind():
    wanted = {
        f"imagenet256_{architecture}_{size}_{kind}"
        for architecture in ("dit", "uvit", "mamba", "rwkv")
        for size in ("s", "b", "xl")
        for kind in ("dense", "tread")
    }
    assert wanted == set(IMAGENET)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_how_it_is_run_and_what_it_is(recipe):
    path = ["data.path=there"] if recipe in IMAGENET else []
    head, keywords = head_of(recipe), full_settings(f"experiment={recipe}", *path)
    assert f"experiment={recipe}" in head
    routed = recipe.endswith("tread")
    assert keywords["routing"]["name"] == ("tread" if routed else "none")
    if recipe in IMAGENET:
        assert "Not run by us" in head
        assert keywords["training"]["batch_size"] * 8 == 256
        assert keywords["training"]["num_steps"] == 400_000
        with torch.device("meta"):
            network = create_backbone(
                input_size=32, in_channels=4, num_classes=1000, **keywords["backbone"]
            )
        millions = re.search(r"([\d.]+) M\s*(?:#\s*)?parameters\.", head)
        if millions:
            count = sum(parameter.numel() for parameter in network.parameters()) / 1e6
            assert float(millions.group(1)) == pytest.approx(count, abs=0.06)
    else:
        assert parts_of(keywords).settings


@pytest.fixture
def latents(tmp_path):
    """Sixteen moments of ImageNet's shape."""
    values = np.random.default_rng(0).standard_normal((2, 16, 8, 32, 32)).astype(np.float32)
    np.savez(tmp_path / "set.npz", moments=values[0], latents_flip=values[1], labels=np.arange(16))
    return f"data.path={tmp_path / 'set.npz'}"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["dit", "uvit", "mamba", "rwkv"])
def test_a_recipe_for_imagenet_trains_at_small_size(architecture, latents, tmp_path):
    depth = {"rwkv": 5, "dit": 8}.get(architecture, 6)
    given = [f"experiment=imagenet256_{architecture}_s_tread", latents, "data.num_classes=1000",
             "data.held_out=0.2", f"backbone.depth={depth}", *TINY]  # fmt: skip
    given += ["backbone.num_heads=2"] if architecture in ("dit", "uvit") else []
    folder = train(**full_settings(*given, f"run_dir={tmp_path / 'run'}"))
    assert (folder / "score.json").exists()
