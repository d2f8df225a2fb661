"""Every recipe composes into a run that can be built, and its head says what is true."""

import itertools
import re

import numpy as np
import pytest
import torch
import yaml

from scripts.compare import split_sweeps
from tests.data.published_files import write_cifar10, write_fashion_mnist
from tests.small_run import CONFIGS, SMALL, full_settings, parts_of, train_small
from tread_zoo import create_backbone
from tread_zoo.comparison.reference import differences, load_curves, wanted_settings
from tread_zoo.comparison.reference.settings import KNOWN_DATA
from tread_zoo.training import train
from tread_zoo.training.trackers import read_metrics

RECIPES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
DOWNLOADED = {"fashion_mnist": write_fashion_mnist, "cifar10": write_cifar10}
CURVES = load_curves(CONFIGS / "experiment" / "curves")
IMAGENET = [name for name in RECIPES if name.startswith("imagenet256")]
TINY = ["backbone.hidden_size=16", "training.num_steps=2", "training.batch_size=2",
        "training.num_workers=0", "training.precision=fp32", "sampler.num_steps=2",
        "evaluation.num_images=2", "tracker=local", "device=cpu"]  # fmt: skip


def head_of(recipe):
    text = (CONFIGS / "experiment" / f"{recipe}.yaml").read_text()
    return text[: text.index("defaults:")]


def set_of(recipe):
    """Return the downloaded set of a recipe, or None."""
    return next((name for name in DOWNLOADED if recipe.startswith(name)), None)


def data_for(recipe, folder):
    """Return the override by which a recipe's data are found, small files in place of the sets."""
    if recipe in IMAGENET:
        return ["data.path=there"]
    if set_of(recipe) is None:
        return []
    DOWNLOADED[set_of(recipe)](folder)
    return [f"data.path={folder}"]


def test_there_is_a_recipe_for_each_architecture_size_and_kind():
    wanted = {
        f"imagenet256_{architecture}_{size}_{kind}"
        for architecture in ("dit", "uvit", "mamba", "rwkv")
        for size in ("s", "b", "xl")
        for kind in ("dense", "tread")
    }
    assert wanted == set(IMAGENET)
    wanted |= {
        f"{data}_{architecture}_{kind}"
        for data in ("digits", *DOWNLOADED)
        for architecture in ("dit", "uvit", "mamba", "rwkv")
        for kind in ("dense", "tread")
    }
    assert wanted == set(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_how_it_is_run_and_what_it_is(recipe, tmp_path):
    path = data_for(recipe, tmp_path)
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
        settings = parts_of(keywords).settings
        wanted = wanted_settings(keywords, settings["data"] if set_of(recipe) else {})
        known = KNOWN_DATA[keywords["data"]["name"]][-1]
        assert wanted["data"]["num_images"] == known
        settings["data"] |= {"num_images": known} if set_of(recipe) else {}  # the files are small
        assert {**wanted, "data": {"name": settings["data"]["name"], **wanted["data"]}} == {
            name: settings[name] for name in wanted
        }
        points = keywords["training"]["num_steps"] // keywords["training"]["sample_every"]
        assert points >= 6 or set_of(recipe) is None
    if recipe in CURVES:
        curve = CURVES[recipe].settings
        assert differences(curve, wanted_settings(keywords, curve["data"]), scoring=True) == []
    if set_of(recipe) == "cifar10":
        assert "colour and texture only" in head


@pytest.mark.parametrize("study", sorted(DOWNLOADED))
def test_a_study_has_exactly_the_settings_of_its_recipes(study):
    """Backbones, routings and seeds of the one grid, with what the study fixes, and no more."""
    given = yaml.safe_load((CONFIGS / "study" / f"{study}.yaml").read_text())
    [grid], fixed = split_sweeps(given["grids"], [], given["fixed"])
    assert grid.pop("seed") == ["0", "1"]
    recipes = [name for name in RECIPES if set_of(name) == study]
    for recipe in recipes:
        backbone, routing = parts_named_by(recipe)
        text = (CONFIGS / "experiment" / f"{recipe}.yaml").read_text()
        assert yaml.safe_load(text) == {
            "defaults": [f"base/{study}", {"override /backbone": backbone},
                         {"override /routing": routing}]
        }  # fmt: skip
    pairs = itertools.product(grid["backbone"], grid["routing"])
    assert sorted(map(parts_named_by, recipes)) == sorted(pairs)
    backbone, routing = parts_named_by(recipes[0])
    swept = full_settings(*fixed, f"backbone={backbone}", f"routing={routing}")
    assert swept == full_settings(f"experiment={recipes[0]}")


def parts_named_by(recipe):
    """Return backbone and routing of a recipe for a laptop."""
    _, architecture, kind = recipe.rsplit("_", 2)
    return f"{architecture}_tiny", "none" if kind == "dense" else kind


@pytest.fixture(params=sorted(DOWNLOADED))
def sources(request, tmp_path):
    """Overrides of a recipe with the files as they are published, and with an .npz of the same."""
    if request.param == "fashion_mnist":
        x, y, test_x, test_y = write_fashion_mnist(tmp_path)
    else:
        *parts, test_part = write_cifar10(tmp_path).values()
        (x, y), (test_x, test_y) = (
            (part[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), part[:, 0])
            for part in (np.concatenate(parts), test_part)
        )  # channels last, as most .npz files have them
    np.savez(tmp_path / "set.npz", x_train=x, y_train=y, x_test=test_x, y_test=test_y)
    given = [f"experiment={request.param}_dit_tread", "training.num_steps=3",
             "training.log_every=1", "data.num_classes=10"]  # fmt: skip
    npz = ["data=npz", f"data.path={tmp_path / 'set.npz'}"]
    return [*given, f"data.path={tmp_path}"], [*given, *npz]


def test_a_downloaded_set_and_an_npz_of_it_are_the_same_data(sources):
    """Same images, order, classes and split."""
    one, other = (parts_of(full_settings(*SMALL, *source)) for source in sources)
    assert differences(one.settings, other.settings, scoring=True) == []
    assert one.data.name != other.data.name
    for part in ("train", "held_out"):
        ours, theirs = (getattr(parts.data, part) for parts in (one, other))
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


@pytest.mark.slow
def test_a_downloaded_set_and_an_npz_of_it_train_alike_to_the_bit(sources, tmp_path):
    folders = [train_small(tmp_path / str(index), *source) for index, source in enumerate(sources)]
    weights, rows = zip(*map(_left_by, folders), strict=True)
    assert weights[0] == weights[1]
    assert rows[0] == rows[1]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 3, 3]


def _left_by(folder):
    """Return the weights' bytes, and the losses of every line."""
    rows = [
        {key: value for key, value in row.items() if "loss" in key or key == "step"}
        for row in read_metrics(folder)
    ]
    files = sorted((folder / "checkpoints").glob("*/*.safetensors"))
    assert files
    return [file.read_bytes() for file in files], rows


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
