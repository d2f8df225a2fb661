"""A new run from trained weights: `init_from` of an import, of a run, of what was pushed."""

import shutil

import pytest
import torch

from tests.published.tensors import theirs
from tests.small_run import SMALL, fields_of, settings, train_quickly
from tread_zoo.model_card import write_model_folder
from tread_zoo.published import import_checkpoint
from tread_zoo.runs.checkpoint import CheckpointError, find_checkpoint, load_backbone
from tread_zoo.runs.init_from import resolve_init_from

UNSAID = [word for word in SMALL if not word.startswith("backbone.")]
STILL = ["training.num_steps=1", "optimizer.learning_rate=1e-12"]  # weights stay what they are


def start(folder, source, *overrides):
    given = fields_of(*UNSAID, *STILL, *overrides)
    if not any(word.startswith("backbone=") for word in overrides):
        given.get("backbone", {}).pop("name", None)
    return train_quickly(**{**given, "init_from": str(source), "run_dir": str(folder)})


def assert_carried(source, run, *fresh):
    """Check that model and average start from the weights of the source, except the given
    layers."""
    expected = find_checkpoint(source).tensors("ema")
    for part in ("model", "ema"):
        for name, tensor in find_checkpoint(run).tensors(part).items():
            if fresh and name.startswith(fresh):
                assert name not in expected or tensor.shape != expected[name].shape
            else:
                torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


def imported(folder, **sizes):
    """Return the folder of an imported DiT for images of 8x8."""
    sizes = {"channels": 1, "rows": 11, "sigma": False, "width": 32, "depth": 4, **sizes}
    torch.save(theirs("sit", **sizes), folder.with_suffix(".pt"))
    import_checkpoint(folder.with_suffix(".pt"), folder, format="sit", num_heads=2)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return imported(tmp_path_factory.mktemp("imports") / "sit")


@pytest.mark.slow
def test_an_import_is_finetuned_with_its_own_sizes_and_resumed_without_it(source, tmp_path, caplog):
    moved = shutil.copytree(source, tmp_path / "sit")
    with caplog.at_level("INFO"):
        run = start(tmp_path / "run", moved)
    assert_carried(source, run)
    assert "fresh" not in caplog.text
    one, other = (load_backbone(find_checkpoint(place)).config for place in (source, run))
    assert {**one, "input_size": [8, 8]} == other
    assert other["reversed_time"], "what no shape shows is the checkpoint's, too"
    shutil.rmtree(moved)
    start(run, moved, "training.num_steps=2", "lr_schedule=constant", "resume=latest")
    assert find_checkpoint(run).step == 2
    with pytest.raises(CheckpointError, match="init_from"):
        start(tmp_path / "other", moved)


@pytest.mark.parametrize("name", ["dit", "dit_tiny", "rwkv"])
def test_another_backbone_than_that_of_the_weights_is_refused(name):
    with pytest.raises(CheckpointError, match="init_from=mamba has a mamba_tiny"):
        resolve_init_from({"init_from": "mamba", "backbone": name})


def test_a_run_is_named_after_the_backbone_of_its_weights():
    settings, _ = resolve_init_from({"init_from": "mamba", "backbone": {"depth": 3}})
    assert settings["backbone"]["name"] == "mamba_tiny"
    assert resolve_init_from({"init_from": "mamba"})[0]["run_dir"].startswith("runs/digits_mamba")


@pytest.mark.slow
def test_what_cannot_be_carried_starts_fresh_and_is_said(tmp_path, caplog):
    few = imported(tmp_path / "few", rows=8)
    with caplog.at_level("INFO"):
        run = start(
            tmp_path / "run", few, "routing=sprint", "backbone.learn_sigma=true",
            "objective=edm",
        )  # fmt: skip
    assert_carried(few, run, "label_embed", "routing", "final.linear")
    (line,) = [each.message for each in caplog.records if each.message.startswith("init ")]
    for words in ("label_embed", "routing.", "final.linear", "flow", "edm"):
        assert words in line


@pytest.mark.slow
def test_a_run_and_what_was_pushed_are_sources(source, tmp_path):
    first = start(tmp_path / "first", source)
    for place in (first, write_model_folder(first), first / "checkpoints" / "step_00000001"):
        assert_carried(first, start(tmp_path / "next", place, "overwrite=true"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["backbone.depth=3"], "backbone.depth=3, not 4"),
        (["backbone=dit_b_2"], "backbone.hidden_size=768, not 32"),
        (["backbone=mamba"], "backbone=mamba_tiny"),
    ],
)
def test_a_body_that_does_not_fit_is_an_error_of_its_field(source, tmp_path, overrides, words):
    with pytest.raises(CheckpointError, match=words):
        start(tmp_path / "run", source, *overrides)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_options_alone_are_those_of_the_checkpoint_s_architecture(run, tmp_path):
    source = run("source", "backbone=mamba", "training.num_steps=1")
    given = {"init_from": str(source), "run_dir": str(tmp_path / "next")}
    given |= {"backbone": {"state_size": 4, "depth": 4}}
    folder = train_quickly(**{**settings(*STILL), **given})
    assert_carried(source, folder)
    config = find_checkpoint(folder).meta["config"]["backbone"]
    assert (config["name"], config["hidden_size"]) == ("mamba_tiny", 16)
    longer = {**settings(*STILL), **given, "training": {"num_steps": 2}, "resume": "latest"}
    assert find_checkpoint(train_quickly(**longer)).step == 2


def test_data_of_other_channels_are_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="in_channels=1, not 4"):
        start(tmp_path / "run", imported(tmp_path / "latents", channels=4))
