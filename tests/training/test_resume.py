"""A resumed run equals an unbroken one, to the bit."""

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from tests.small_run import parts_of, settings, train_small
from tread_zoo.training import loop as module
from tread_zoo.training.checkpoints import find_checkpoint
from tread_zoo.training.parts import draw_step
from tread_zoo.training.reporting import Reporter
from tread_zoo.training.stopping import Stopped


def assert_same_end(one, other):
    first, second = find_checkpoint(one), find_checkpoint(other)
    assert first.step == second.step
    for part in ("model", "ema", "optimizer"):
        left, right = first.tensors(part), second.tensors(part)
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), f"{part}: {key}"


@pytest.fixture
def stop_at(monkeypatch):
    """Send this process a signal while a given step is computed."""

    def arrange(step, number):
        original = module.draw_step

        def draw(parts, *batch, micro_step, **keywords):
            if micro_step == step * parts.options.gradient_accumulation_steps:
                os.kill(os.getpid(), number)
            return original(parts, *batch, micro_step=micro_step, **keywords)

        monkeypatch.setattr(module, "draw_step", draw)

    return arrange


@pytest.mark.parametrize(("backbone", "objective"), [("dit", "edm"), ("mamba", "flow")])
def test_a_run_that_is_killed_and_resumed(run, stop_at, backbone, objective, monkeypatch):
    options = [f"backbone={backbone}", f"objective={objective}", "training.horizontal_flip=true"]
    unbroken = run("unbroken", *options)
    stop_at(2, signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        run("broken", *options)
    assert stopped.value.code == 128 + signal.SIGTERM
    monkeypatch.undo()
    broken = unbroken.parent / "broken"
    assert find_checkpoint(broken).step == 3
    run("broken", *options, "resume=latest")
    assert_same_end(unbroken, broken)


@pytest.fixture(scope="module")
def in_two_parts(tmp_path_factory):
    """Return the folder of a run of 3 steps that was taken up for 3 more."""
    folder = tmp_path_factory.mktemp("in_two_parts")
    first = ("training.num_steps=3", "training.checkpoint_every=3")
    train_small(folder, "training.schedule=constant", *first)
    return train_small(folder, "training.schedule=constant", "resume=latest")


def test_twice_n_steps_equal_n_then_n_more(run, in_two_parts):
    assert_same_end(run("unbroken", "training.schedule=constant"), in_two_parts)


def test_accumulation_and_half_precision_resume_exactly(run, stop_at, monkeypatch):
    options = ["training.gradient_accumulation_steps=2", "training.precision=bf16"]
    unbroken = run("unbroken", *options)
    stop_at(3, signal.SIGINT)
    with pytest.raises(Stopped) as stopped:
        run("broken", *options)
    assert stopped.value.code == 128 + signal.SIGINT
    monkeypatch.undo()
    assert_same_end(unbroken, run("broken", *options, "resume=latest"))


def test_a_resumed_run_knows_what_all_of_its_time_went_into(in_two_parts, tmp_path):
    """Of the first part the checkpoint tells; one of an earlier version did not."""
    first = find_checkpoint(in_two_parts / "checkpoints" / "step_00000003").meta["clock"]
    assert first["since"] == 0
    record = json.loads((in_two_parts / "score.json").read_text())["run"]
    assert "seconds_since_step" not in record
    assert all(record["seconds"][name] > first["seconds"][name] for name in ("training", "data"))

    shutil.copytree(in_two_parts, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    file = tmp_path / "run" / "checkpoints" / "step_00000003" / "checkpoint.json"
    meta = json.loads(file.read_text())
    del meta["clock"], meta["checkpoint_sha256"]
    file.write_text(json.dumps(meta))
    folder = train_small(tmp_path / "run", "training.schedule=constant", "resume=latest")
    assert json.loads((folder / "score.json").read_text())["run"]["seconds_since_step"] == 3
    assert find_checkpoint(folder).meta["clock"]["since"] == 3


def test_metrics_of_a_resumed_run_have_each_step_once(in_two_parts):
    rows = [json.loads(line) for line in (in_two_parts / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == sorted(set(steps))
    assert steps[-1] == 6


def test_a_crash_between_checkpoints_loses_only_what_came_after(run, monkeypatch):
    unbroken = run("unbroken", "training.checkpoint_every=2")
    original = Reporter.numbers

    def crash(self, step, values):
        original(self, step, values)
        if step == 4:
            raise RuntimeError("power cut")

    monkeypatch.setattr(Reporter, "numbers", crash)
    with pytest.raises(RuntimeError, match="power cut"):
        run("broken", "training.checkpoint_every=2")
    monkeypatch.undo()
    broken = unbroken.parent / "broken"
    assert find_checkpoint(broken).step == 2
    run("broken", "training.checkpoint_every=2", "resume=latest")
    assert_same_end(unbroken, broken)
    steps = [json.loads(line)["step"] for line in (broken / "metrics.jsonl").open()]
    assert [s for s in steps if s == 4] == [4]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the folder of a run that was started with resume=latest."""
    return train_small(tmp_path_factory.mktemp("finished"), "resume=latest")


def test_latest_without_a_checkpoint_starts(finished):
    assert find_checkpoint(finished).step == 6


def test_resuming_a_finished_run_changes_nothing(run, finished, copy_of):
    folder = copy_of(finished)
    before = load_file(find_checkpoint(folder).path / "model.safetensors")
    run("run", "resume=latest")
    after = load_file(find_checkpoint(folder).path / "model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_seeds_and_ranks_draw_apart():
    def draw(seed, rank, micro_step):
        parts = parts_of(settings(f"seed={seed}"))
        images, labels = next(parts.batches(0, 1, 0))
        return draw_step(
            parts, images, labels, rank=rank, num_ranks=2, micro_step=micro_step,
            device=torch.device("cpu"),
        )  # fmt: skip

    base, again = draw(0, 0, 0), draw(0, 0, 0)
    assert torch.equal(base.draw.noise, again.draw.noise)
    assert torch.equal(base.routes[0].ids, again.routes[0].ids)
    for other in (draw(1, 0, 0), draw(0, 1, 0), draw(0, 0, 1)):
        assert not torch.equal(base.draw.noise, other.draw.noise)
        assert not torch.equal(base.routes[0].ids, other.routes[0].ids)
