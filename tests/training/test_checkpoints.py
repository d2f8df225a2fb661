import json
import logging
import subprocess
import sys

import pytest
import torch

from tests.small_run import settings
from tread_zoo.diffusion import ClassifierFree, NoGuidance
from tread_zoo.training.checkpoints import (
    CheckpointError,
    find_checkpoint,
    load_backbone,
    save_checkpoint,
)
from tread_zoo.training.restore import restore


def save(folder, step, keep=2, **meta):
    parts = {"model": {"w": torch.full((4,), float(step))}}
    return save_checkpoint(folder, parts, {"step": step, **meta}, keep)


def test_rotation_keeps_the_newest(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000002", "step_00000003"]
    assert find_checkpoint(tmp_path).step == 3


def test_a_path_may_be_the_run_its_checkpoints_or_one_of_them(tmp_path):
    one = save(tmp_path, 1)
    save(tmp_path, 2)
    assert find_checkpoint(tmp_path).step == 2
    assert find_checkpoint(tmp_path / "checkpoints").step == 2
    assert find_checkpoint(one).step == 1


def test_weights_are_safetensors_without_pickle(tmp_path):
    files = {path.name for path in save(tmp_path, 1).iterdir()}
    assert files == {"model.safetensors", "checkpoint.json"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "json"])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(tmp_path, damage, caplog):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "truncate":
        file.write_bytes(content[:-3])
    elif damage == "remove":
        file.unlink()
    else:
        (newest / "checkpoint.json").write_text('{"format": 1,')
    with pytest.raises(CheckpointError, match=r"step_00000002 is damaged.*Use another checkpoint"):
        find_checkpoint(newest)
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint(tmp_path).step == 1
    assert "step_00000002 is damaged" in caplog.text
    assert "Falling back" in caplog.text


def test_an_empty_folder_and_another_format(tmp_path):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
    path = save(tmp_path, 1)
    meta = json.loads((path / "checkpoint.json").read_text())
    (path / "checkpoint.json").write_text(json.dumps({**meta, "format": 99}))
    with pytest.raises(CheckpointError, match=r"format 99"):
        find_checkpoint(path)


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from tread_zoo.training.checkpoints import CheckpointError, save_checkpoint
folder = Path(sys.argv[1])
save_checkpoint(folder, {"model": {"w": torch.zeros(10)}}, {"step": 1}, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(folder, {"model": {"w": torch.zeros(100_000)}}, {"step": 2}, 2)
except CheckpointError as error:
    print(error)
    sys.exit(3)
"""


def test_a_disk_that_is_full_while_saving_keeps_the_previous_checkpoint(tmp_path):
    """The limit on file size makes the write itself fail, as a full disk does."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "could not save" in done.stdout
    assert "step_00000001 is intact" in done.stdout
    assert "resume=latest" in done.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]
    assert find_checkpoint(tmp_path).step == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["backbone=mamba"], ["backbone.name='dit_tiny', not 'mamba_tiny'"]),
        (["backbone.depth=6"], ["backbone.config.depth=4, not 6"]),
        (["objective=edm"], ["objective.name='flow', not 'edm'"]),
        (["seed=1"], ["seed=0, not 1"]),
        (["data.held_out=0.5"], ["data.num_images=1438"]),
    ],
)
def test_resuming_something_else_names_the_difference(run, tmp_path, overrides, words):
    from tread_zoo.training import train

    folder = run("run", "training.num_steps=1")
    with pytest.raises(CheckpointError) as error:
        train(**settings("resume=latest", f"run_dir={folder}", *overrides))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert find_checkpoint(folder).step == 1


def test_finetuning_with_another_routing_is_allowed_and_said(run, caplog):
    run("run", "training.num_steps=1")
    with caplog.at_level(logging.WARNING):
        run("run", "routing=none", "resume=latest")
    assert "routing.name='tread', not 'none'" in caplog.text


def test_restore_gives_back_what_sampling_needs(run):
    folder = run("run", "objective=edm", "sampler=heun", "sampler.num_steps=3")
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    unset = {"name": None, "num_steps": None}
    sampling = restored.sampling(unset, {"scale": None})
    assert (sampling.sampler.name, sampling.num_steps) == ("heun", 3)
    assert sampling.guidance == NoGuidance()
    changed = restored.sampling({"name": "euler", "num_steps": 9}, {"scale": 2.0})
    assert (changed.sampler.name, changed.num_steps) == ("euler", 9)
    assert changed.guidance == ClassifierFree(scale=2.0)
    assert type(restored.objective).__name__ == "EDM"
    assert len(restored.data({}).train) == 1438
    with pytest.raises(ValueError, match="weights='last' must be ema or model"):
        restore(folder, weights="last", device="cpu", precision="fp32")


def test_weights_that_do_not_fit_are_named(run):
    folder = run("run", "training.num_steps=1")
    checkpoint = find_checkpoint(folder)
    checkpoint.meta["backbone"]["config"]["depth"] = 6
    with pytest.raises(CheckpointError, match=r"does not fit.*blocks\.4"):
        load_backbone(checkpoint)
