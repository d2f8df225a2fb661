import errno
import json
import os
import shutil
import stat
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from scripts.sample import SampleConfig
from tests.processes import run_python
from tests.small_run import META, train_small
from tread_zoo import load_pretrained
from tread_zoo.checkpoint_config import EvaluateConfig
from tread_zoo.cli import compose_settings
from tread_zoo.data.files import write_text
from tread_zoo.diffusion import AutoGuidance
from tread_zoo.fields import check
from tread_zoo.routing import Stack
from tread_zoo.runs.checkpoint import (
    CheckpointError,
    delete_later_checkpoints,
    find_checkpoint,
    load_backbone,
    save_checkpoint,
)
from tread_zoo.runs.restore import overlay, restore


def save(folder, step):
    parts = {"model": {"w": torch.full((4,), float(step))}}
    return save_checkpoint(folder, parts, {**META, "step": step}, keep=2)


def test_the_newest_are_kept_and_copies_are_the_user_s(tmp_path):
    first = save(tmp_path, 1)
    assert {path.name for path in first.iterdir()} == {"model.safetensors", "checkpoint.json"}
    copies = [first.parent / name for name in ("step_00000001_best", "step_backup")]
    for copy in copies:
        shutil.copytree(first, copy)
    for step in (2, 3, 4):
        newest = save(tmp_path, step)
    kept = [newest, newest.with_name("step_00000003"), *copies]
    assert set(first.parent.iterdir()) == set(kept)
    assert [find_checkpoint(path).step for path in (tmp_path, first.parent, kept[1])] == [4, 4, 3]
    delete_later_checkpoints(tmp_path, 3)
    assert find_checkpoint(tmp_path).step == 3
    assert [find_checkpoint(copy).step for copy in copies] == [1, 1]
    save(tmp_path / "step_study", 7)
    assert find_checkpoint(tmp_path / "step_study").step == 7


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", lambda content: content[:-1] + b"x"),
        ("model.safetensors", lambda content: content[:-3]),
        ("checkpoint.json", lambda content: b'{"format": 1,'),
        ("checkpoint.json", lambda content: content.replace(b'"format": 2', b'"format": 99')),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_taken(
    tmp_path, file, damage, caplog
):
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / file).write_bytes(damage((newest / file).read_bytes()))
    with pytest.raises(CheckpointError, match="step_00000002 is damaged"):
        find_checkpoint(newest)
    assert find_checkpoint(tmp_path).step == 1
    assert "step_00000002 is damaged" in caplog.text
    (newest / file).unlink()
    assert find_checkpoint(tmp_path).step == 1


def test_a_run_that_is_not_here_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **b: pytest.fail("asked"))
    for path in ("runs/mine", "./mine", "../mine", "/mine/too"):
        for load in (find_checkpoint, load_pretrained):
            with pytest.raises((CheckpointError, OSError), match=f"there is no {Path(path)}"):
                load(path)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)


@pytest.mark.slow
def test_a_bit_that_flips_in_checkpoint_json_is_noticed_or_changes_nothing(tmp_path):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / "checkpoint.json"
    content, meta = file.read_bytes(), find_checkpoint(tmp_path).meta
    for place in range(8 * len(content)):
        if place % 7 == 0:  # any bit of a byte, in turn
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            file.write_bytes(flipped)
            other = find_checkpoint(tmp_path)
            assert other.step == 1 or meta.items() <= other.meta.items(), bytes(flipped)


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    synced, named = set(), []

    def fsync(handle):
        synced.add(os.fstat(handle).st_ino)

    def moving(move):
        def checked(source, target, **options):
            files = [Path(source), *Path(source).glob("*")]
            named.append((Path(target), {file.stat().st_ino for file in files} <= synced))
            move(source, target, **options)

        return checked

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        for name in ("rename", "replace"):
            patch.setattr(os, name, moving(getattr(os, name)))
        path = save(tmp_path, 1)
        write_text(tmp_path / "score.json", "{}")
    assert named == [(path, True), (tmp_path / "score.json", True)]
    assert path.parent.stat().st_ino in synced, "the new name itself"


@pytest.mark.parametrize(
    ("code", "kind", "saves"),
    [
        (errno.EIO, "file", False),
        (errno.EIO, "folder", False),
        (errno.EINVAL, "folder", True),  # the error of file systems without this feature
    ],
)
def test_an_error_of_the_disk_is_reported(tmp_path, monkeypatch, code, kind, saves):
    save(tmp_path, 1)
    sync = os.fsync

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode) == (kind == "folder"):
            raise OSError(code, os.strerror(code))
        sync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    if saves:
        save(tmp_path, 2)
    else:
        with pytest.raises(CheckpointError, match="step_00000001 is intact"):
            save(tmp_path, 2)
    assert find_checkpoint(tmp_path).step == 1 + saves


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from tread_zoo.runs.checkpoint import CheckpointError, save_checkpoint
folder = Path(sys.argv[1])
save_checkpoint(folder, {"model": {"w": torch.zeros(10)}}, {"step": 1}, 2)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(folder, {"model": {"w": torch.zeros(100_000)}}, {"step": 2}, 2)
except CheckpointError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_while_saving_keeps_the_previous_checkpoint(tmp_path):
    """The limit on file size makes the write itself fail, as a full disk does."""
    done = run_python("-c", FULL_DISK, tmp_path)
    assert done.returncode == 3, done.stderr
    assert "step_00000001 is intact" in done.stdout
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """Return the folder of a run of one step."""
    return train_small(tmp_path_factory.mktemp("one_step"), "training.num_steps=1")


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """Return the folder of a run with a sampler and a guidance of its own."""
    return train_small(
        tmp_path_factory.mktemp("guided"), "training.num_steps=1", "sampler.num_steps=4",
        "sampler.shift=3", "sampler.selection_rate=0.25", "guidance=cfg", "guidance.scale=2.5",
        "evaluation.num_images=1",
    )  # fmt: skip


def sampled_as(restored, sampler=None, guidance=None):
    """Return all settings of `restored` with changes, as one mapping."""
    return restored.sampling(sampler or {}, guidance or {}).as_dict()


@pytest.mark.slow
def test_sampling_at_a_rate_routes_as_training_did(one_step):
    restored = restore(one_step, weights="ema", device="cpu", precision="fp32")
    sampling = restored.sampling({"selection_rate": 0.75}, {})
    assert sampling.selection_rate == 0.75
    assert sampling.trained.ranges(Stack.of(restored.backbone)) == [(1, 3)]
    assert sampled_as(restored)["selection_rate"] == 0.0


@pytest.mark.slow
def test_sampling_as_the_run_had_it_but_for_a_value(run):
    folder = run(
        "run", "training.num_steps=1", "sampler=flow_sde", "sampler.num_steps=3",
        "sampler.shift=2", "guidance=sparse", "guidance.weak_rate=0.6",
    )  # fmt: skip
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    own = sampled_as(restored)
    assert (own["sampler"], own["num_steps"], own["shift"], own["diffusion"]) == (
        "flow_sde", 3, 2, 1.0,
    )  # fmt: skip
    assert (own["guidance"], own["guidance_scale"], own["guidance_weak_rate"]) == ("sparse", 2, 0.6)
    assert sampled_as(restored, {"diffusion": 0.5}) == {**own, "diffusion": 0.5}
    assert sampled_as(restored, guidance={"scale": 3.0}) == {**own, "guidance_scale": 3.0}
    other = sampled_as(restored, {"name": "dpmpp_2m"}, {"name": "cfg"})
    assert other.items() >= {"num_steps": 3, "shift": 2, "guidance_scale": 2.0}.items()
    assert "diffusion" not in other
    part = {"name": "interval", "high": 0.5}
    assert overlay("guidance", part, {"high": None}) == {**part, "high": None}
    with pytest.raises(ValueError, match=r"guidance\.low"):
        sampled_as(restored, guidance={"low": 0.1})
    score = json.loads((folder / "score.json").read_text())["protocol"]
    assert (score["sampling"], score["nfe"]) == (own, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sampler", "guidance"),
    [
        ([], {}, {}),
        (["sampler.num_steps=5"], {"num_steps": 5}, {}),
        (["sampler={name: flow_sde, diffusion: 2}"], {"name": "flow_sde", "diffusion": 2}, {}),
        (["guidance=interval", "sampler=dpmpp_2m"], {"name": "dpmpp_2m"}, {"name": "interval"}),
        (["guidance=none"], {}, {"name": "none"}),
    ],
)
def test_the_command_line_changes_what_the_same_words_change_in_python(
    guided, words, sampler, guidance
):
    restored = restore(guided, weights="ema", device="cpu", precision="fp32")
    given = ["checkpoint=x", *words]
    for script, config in (("sample", SampleConfig), ("evaluate", EvaluateConfig)):
        settings = check(config, compose_settings(script, given, config))
        typed = sampled_as(restored, settings.sampler, settings.guidance)
        assert typed == sampled_as(restored, sampler, guidance)
        assert (typed["shift"], typed["selection_rate"]) == (3.0, 0.25)
        assert typed["num_steps"] == sampler.get("num_steps", 4)
        assert guidance.get("name") == "none" or typed["guidance_scale"] == 2.5


@pytest.mark.slow
def test_autoguidance_takes_an_earlier_or_smaller_network(run, tmp_path):
    weak = run("weak", "training.num_steps=1", "backbone.depth=3")
    folder = run(
        "run", "training.num_steps=1", "guidance=auto", f"guidance.weak_checkpoint={weak}"
    )  # fmt: skip
    restored = restore(folder, weights="ema", device="cpu", precision="fp32")
    options = restored.sampling({}, {})
    assert options.guidance == AutoGuidance(weak_checkpoint=str(weak))
    network = restored.weak(options).backbone
    expected = load_backbone(find_checkpoint(weak)).state_dict()
    assert all(torch.equal(value, expected[k]) for k, value in network.state_dict().items())
    assert restored.weak(restored.sampling({}, {"name": "none"})) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "guidance", "words"),
    [
        (["objective=edm"], "auto", "has objective"),
        (["data.num_classes=3", "data.path=three.npz"], "auto", "classes"),
        (["data.path=other.npz"], "auto", "class_names"),
        (["training.label_dropout=0"], "custom", "label_dropout"),
        (["routing=none"], "sparse_auto", "routing=none"),
    ],
)
def test_a_weak_network_of_another_kind_is_refused_before_training(
    run, tmp_path, monkeypatch, overrides, guidance, words
):
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8), np.uint8)
    for name, classes in {"four": "abcd", "other": "efgh", "three": "abc"}.items():
        labels = [classes[i % len(classes)] for i in range(40)]
        np.savez(f"{name}.npz", images=images, labels=labels)
    data = ["data=npz", "data.path=four.npz", "training.num_steps=1"]
    weak = run("weak", *data, *overrides)
    guided = [f"guidance={guidance}", f"guidance.weak_checkpoint={weak}"]
    guided += ["guidance.drop_label=true"] if guidance == "custom" else []
    with pytest.raises(ValueError, match=words):
        run("run", *data, *guided)
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_are_named(one_step):
    checkpoint = find_checkpoint(one_step)
    checkpoint.meta["backbone"]["config"]["depth"] = 6
    with pytest.raises(CheckpointError, match=r"does not fit.*blocks\.4"):
        load_backbone(checkpoint)
