"""A resumed run equals an unbroken one, to the bit."""

import json
import os
import signal
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image

from tests.small_run import parts_of, save_photos, settings, train_small
from tread_zoo import __version__
from tread_zoo.config import make_config
from tread_zoo.diffusion.samplers import Euler
from tread_zoo.registry import register
from tread_zoo.runs.checkpoint import CheckpointError, check_same_data, find_checkpoint
from tread_zoo.training.log import Log, read_scores
from tread_zoo.training.loop import train
from tread_zoo.training.optimizer_state import load_optimizer_state, optimizer_state
from tread_zoo.training.signals import Stopped
from tread_zoo.training.step import draw_step
from tread_zoo.training.trackers import read_lines, read_metrics


def assert_same_end(one, other):
    first, second = find_checkpoint(one), find_checkpoint(other)
    assert first.step == second.step
    parts = {path.stem for path in first.path.glob("*.safetensors")}
    assert parts == {path.stem for path in second.path.glob("*.safetensors")}
    for part in parts:
        left, right = first.tensors(part), second.tensors(part)
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), f"{part}: {key}"
    assert first.meta["optimizer"] == second.meta["optimizer"]


@register("optimizer", "stateless_for_tests")
@dataclass(frozen=True)
class Stateless:
    learning_rate: float = 1e-2

    def build(self, backbone):
        return torch.optim.SGD(backbone.parameters(), lr=self.learning_rate, weight_decay=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["objective=edm", "training.horizontal_flip=true"],
        ["backbone=mamba", "routing.selector=norm", "routing.selection_rate=[linear,0.5,0.75]"],
        ["training.gradient_accumulation_steps=2", "training.precision=bf16"],
        ["optimizer=muon"],
        ["routing=maskdit", "routing.probability=0.5"],
        ["optimizer=stateless_for_tests", "lr_schedule=wsd"],
        ["routing=sprint", "routing.path_drop=0.5"],
        ["routing=mixture_of_depths", "routing.selection_rate=0.5"],
    ],
    ids=["edm", "norm", "accumulation", "muon", "masks", "stateless", "sprint", "depths"],
)  # fmt: skip
def test_a_run_that_is_stopped_and_resumed(run, stopped_run, overrides, tmp_path):
    unbroken = run("unbroken", *overrides)
    stopped_run("broken", 2, signal.SIGTERM, 128 + signal.SIGTERM, *overrides)
    assert find_checkpoint(tmp_path / "broken").step == 3
    assert_same_end(unbroken, run("broken", *overrides, "resume=latest"))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGHUP, 129), (signal.SIGINT, 130), (signal.SIGUSR1, 75)]
)
def test_each_signal_saves_and_has_its_status(stopped_run, tmp_path, number, status):
    before = signal.signal(number, signal.SIG_DFL)  # under nohup one is ignored
    try:
        stopped_run("run", 1, number, status)
    finally:
        signal.signal(number, before)
    assert find_checkpoint(tmp_path / "run").step == 2


@pytest.mark.parametrize("last", [False, True])
def test_of_several_signals_the_one_that_requeues_decides(stopped_run, last):
    both = (signal.SIGUSR1, signal.SIGTERM)
    stopped_run("run", 1, both[::-1] if last else both, 75)


def test_a_handler_of_before_gets_the_signal_after_saving(stopped_run, tmp_path):
    """submitit requeues its job so."""
    steps = []

    def handle(number, frame):
        steps.append(find_checkpoint(tmp_path / "run").step)

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        stopped_run("run", 1, signal.SIGUSR2, 75)
        assert signal.getsignal(signal.SIGUSR2) is handle
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert steps == [2]


@register("sampler", "euler_with_a_signal")
@dataclass(frozen=True, kw_only=True)
class EulerWithASignal(Euler):
    """Euler's rule for 2 evaluations, whose first one of images may be met by a signal."""

    number: ClassVar[int] = 0  # the signal to send, once; 0: none
    saved: ClassVar[list[int]] = []  # steps whose checkpoint was there when sampling began
    evaluated: ClassVar[list[int]] = []  # images of each evaluation since the signal
    folder: ClassVar[str] = ""

    def __call__(self, problem, x, levels):
        here = type(self)
        if len(x) > 1:  # one is for counting FLOPs
            here.saved += [find_checkpoint(self.folder).step]
            if here.number:
                os.kill(os.getpid(), here.number)
                here.number = 0
                here.evaluated.clear()
        for level, after in pairwise(levels):
            x = x + (after - level) * problem.slope(x, float(level))
            here.evaluated.append(len(x))
        return x


DRAWING = (
    "sampler=euler_with_a_signal", "training.sample_every=2", "training.score_every=2",
    "evaluation.metrics=[kid]", "evaluation.num_images=70",
)  # fmt: skip


def drawn(folder):
    """Return the steps that have a held-out loss, a grid, a score."""
    losses = [row["step"] for row in read_metrics(folder) if "held_out_loss" in row]
    grids = [int(path.stem[5:]) for path in sorted(folder.glob("samples/step_*.png"))]
    return losses, grids, [(k, v["values"]) for k, v in read_scores(folder).items()]


@pytest.fixture(scope="module")
def with_drawings(tmp_path_factory):
    """Return the folder of a run that leaves samples and a score at every second step."""
    EulerWithASignal.folder = folder = tmp_path_factory.mktemp("drawings")
    return train_small(folder, *DRAWING, "training.checkpoint_every=2")


@pytest.mark.slow
def test_a_step_is_saved_before_anything_is_drawn(with_drawings):
    assert EulerWithASignal.saved == [2, 2, 4, 4, 6, 6], "a grid and a score each"


@pytest.mark.slow
@pytest.mark.parametrize(("what", "every"), [("samples", 0), ("score", 2)])
def test_a_signal_ends_drawing_and_what_was_cut_is_made_up_for(
    with_drawings, run, tmp_path, what, every
):
    """Also where the step that is drawn from was not to be saved."""
    given = [*DRAWING, f"training.checkpoint_every={every}"]
    if what == "score":
        given.append("training.sample_every=0")
    EulerWithASignal.folder, EulerWithASignal.number = with_drawings, signal.SIGTERM
    with pytest.raises(Stopped) as stopped:
        run("broken", *given)
    assert stopped.value.code == 128 + signal.SIGTERM
    assert EulerWithASignal.evaluated == [], "the next call of the network ends it"
    assert find_checkpoint(tmp_path / "broken").step == 2
    assert drawn(tmp_path / "broken") == ([], [], [])
    broken = run("broken", *given, "resume=latest")
    assert_same_end(with_drawings, broken)
    losses, grids, scores = drawn(broken)
    assert scores == drawn(with_drawings)[2]
    assert losses == grids == ([2, 4, 6] if what == "samples" else [6])


@pytest.fixture(scope="module")
def in_two_parts(tmp_path_factory):
    """Return the folder of a run of 3 steps that was taken up for 3 more."""
    folder = tmp_path_factory.mktemp("in_two_parts")
    train_small(folder, "lr_schedule=constant", "training.num_steps=3")
    return train_small(folder, "lr_schedule=constant", "resume=latest")


def test_twice_n_steps_equal_n_then_n_more_and_each_start_is_recorded(run, in_two_parts):
    unbroken = run("unbroken", "lr_schedule=constant")
    assert_same_end(unbroken, in_two_parts)
    rows, whole = (
        [row["step"] for row in read_metrics(folder) if "loss" in row and row["step"] > 3]
        for folder in (in_two_parts, unbroken)
    )
    assert rows == whole == [4, 6]
    starts = read_lines(in_two_parts / "commands.jsonl")
    assert [start["step"] for start in starts] == [0, 3]
    assert all(start["command"] and start["code"].startswith(__version__) for start in starts)
    assert Image.open(in_two_parts / "samples.gif").n_frames == 2
    first = find_checkpoint(in_two_parts / "checkpoints" / "step_00000003").meta["seconds"]
    last = json.loads((in_two_parts / "score.json").read_text())["run"]["seconds"]
    assert last["training"] > first["training"]


@pytest.mark.slow
def test_a_crash_between_checkpoints_loses_only_what_came_after(run, monkeypatch, tmp_path):
    unbroken = run("unbroken", "training.checkpoint_every=2")
    original = Log.metrics

    def crash(self, state, window):
        original(self, state, window)
        if state.step == 4:
            raise RuntimeError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Log, "metrics", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            run("broken", "training.checkpoint_every=2")
    assert find_checkpoint(tmp_path / "broken").step == 2
    broken = run("broken", "training.checkpoint_every=2", "resume=latest")
    assert_same_end(unbroken, broken)
    assert [row["step"] for row in read_metrics(broken)].count(4) == 1


@pytest.mark.slow
def test_side_files_that_are_damaged_do_not_keep_a_run_from_going_on(in_two_parts, copy_of, caplog):
    folder = copy_of(in_two_parts)
    before = {name: read_lines(folder / name) for name in ("metrics.jsonl", "commands.jsonl")}
    wrong = b'\xff\xfe\n{"step": 3, "lo\n{"loss": 2}\n17\n{"step": null}\n\n'
    for name in ("metrics.jsonl", "commands.jsonl", "scores.jsonl"):
        (folder / name).write_bytes(wrong + (folder / name).read_bytes() + wrong)
    (folder / "corrupt.txt").write_bytes(b"7\tphotos/7.png\tbroken\n\n\xff\xfe\n1")
    train_small(folder, "lr_schedule=constant", "training.num_steps=8", "resume=latest")
    for name, rows in before.items():
        assert read_lines(folder / name)[: len(rows)] == rows
        warned = [text for text in caplog.messages if f"{folder / name}:" in text]
        assert len(warned) == 1, "once: the file is whole then"
    assert list(read_scores(folder)) == [3, 6, 8]
    assert any(row.get("corrupt_items") == 1 for row in read_metrics(folder))


def test_resuming_a_finished_run_changes_nothing(in_two_parts, copy_of):
    """If steps are not given, the run keeps its own number, not the recipe's."""
    folder = copy_of(in_two_parts)
    train_small(folder, "lr_schedule=constant", "resume=latest", training={"num_steps": "auto"})
    assert_same_end(folder, in_two_parts)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("backbone=mamba", "backbone.name"),
        ("backbone.depth=6", "backbone.depth"),
        ("routing=none", "routing.name"),
        ("objective=edm", "objective.name"),
        ("seed=1", "seed"),
        ("data.held_out=0.5", "data.held_out"),
    ],
)
def test_resuming_another_run_names_the_difference(in_two_parts, override, field):
    with pytest.raises(CheckpointError, match=field):
        train_small(in_two_parts, "resume=latest", override)
    assert find_checkpoint(in_two_parts).step == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.learning_rate=0.001", "routing=none", "resume_changed=true"],
         ["routing.name='tread', not 'none'", "optimizer.learning_rate=0.012, not 0.001"]),
        (["optimizer=muon"], ["optimizer.name='adamw', not 'muon'"]),  # it starts anew
        (["training.gradient_accumulation_steps=2"], ["resumed with 16 images per step"]),
    ],
)  # fmt: skip
def test_other_settings_are_allowed_and_said(in_two_parts, copy_of, caplog, overrides, words):
    more = ["lr_schedule=constant", "training.num_steps=7", "resume=latest"]
    folder = train_small(copy_of(in_two_parts), *more, *overrides)
    assert find_checkpoint(folder).step == 7
    assert all(each in caplog.text for each in words)
    last = [row for row in read_metrics(folder) if "loss" in row][-1]
    assert (last["learning_rate"] == 0.001) == ("resume_changed=true" in overrides)


@pytest.mark.slow
def test_a_run_is_continued_by_name_with_its_own_settings(in_two_parts, copy_of):
    folder = copy_of(in_two_parts)
    config = json.loads((folder / "config.json").read_text())
    train(resume=str(folder), training={"num_steps": 7}, backbone="dit")
    assert find_checkpoint(folder).step == 7
    now = json.loads((folder / "config.json").read_text())
    assert make_config(**config).differences(make_config(**now)) == {"training.num_steps": (6, 7)}


@pytest.mark.slow
def test_options_alone_are_those_of_the_run_s_own_part(run):
    folder = run("run", "optimizer=muon", "lr_schedule=constant", "training.num_steps=1")
    given = {"optimizer": {"ns_steps": 4}, "training": {"num_steps": 2}}
    train(run_dir=str(folder), resume="latest", **given)
    assert find_checkpoint(folder).meta["config"]["optimizer"]["ns_steps"] == 4


@pytest.mark.slow
def test_resuming_without_a_run_is_an_error_and_auto_starts(run, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint.*resume=auto"):
        run("typo", "resume=latest")
    assert not (tmp_path / "typo").exists()
    short = ["training.num_steps=1", "lr_schedule=constant", "resume=auto"]
    assert find_checkpoint(run("run", *short)).step == 1
    assert find_checkpoint(run("run", *short, "training.num_steps=2")).step == 2


@pytest.mark.slow
def test_a_run_taken_up_in_its_middle_drops_what_came_after(in_two_parts, copy_of):
    folder = copy_of(in_two_parts)
    middle = f"resume={folder / 'checkpoints' / 'step_00000003'}"
    train_small(folder, "lr_schedule=constant", "training.num_steps=5", middle)
    assert find_checkpoint(folder).step == 5  # the newest: step 6 is gone


def test_data_that_grew_are_noticed(in_two_parts, caplog):
    checkpoint = find_checkpoint(in_two_parts)
    metadata = checkpoint.meta["data"]
    check_same_data(checkpoint, metadata, images=True)
    assert not caplog.text
    check_same_data(checkpoint, {**metadata, "num_images": 1500}, images=True)
    assert "trained on 1438 images, and now there are 1500" in caplog.text


@pytest.mark.slow
def test_other_images_of_the_same_shape_are_noticed(run, tmp_path):
    """The same names, sizes and labels; a picture that was mended, or broke, is no other data."""
    photos = tmp_path / "photos"
    options = [*save_photos(photos), "data.held_out=0", "lr_schedule=constant"]
    options += ["training.max_corrupt_share=0.1", "resume=auto"]
    first = photos / "0" / "00.png"  # the first of those that are compared
    whole = first.read_bytes()
    for step, content in ((1, whole[:60]), (2, whole), (3, whole[:60])):
        first.write_bytes(content)
        run("run", *options, f"training.num_steps={step}")
    save_photos(photos, shade=100)
    with pytest.raises(CheckpointError, match="images"):
        run("run", *options, "training.num_steps=4")


@pytest.mark.slow
def test_other_labels_of_the_same_images_are_noticed(run, tmp_path):
    images, labels = np.zeros((40, 8, 8), np.uint8), np.arange(40) % 4
    options = ["data=npz", f"data.path={tmp_path / 'x.npz'}", "lr_schedule=constant"]
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    run("run", *options, "training.num_steps=1")
    np.savez(tmp_path / "x.npz", images=images, labels=(labels + 1) % 4)
    with pytest.raises(CheckpointError, match="labels"):
        run("run", *options, "training.num_steps=2", "resume=latest")


def test_seeds_and_ranks_draw_apart():
    def draw(seed, rank, step):
        setup = parts_of(settings(f"seed={seed}"))
        _, _, drawn, routes, _ = draw_step(
            setup, next(setup.batches()), step, rank, torch.device("cpu")
        )
        return drawn.noise, routes[0].ids

    base = draw(0, 0, 0)
    assert all(map(torch.equal, base, draw(0, 0, 0)))
    for other in (draw(1, 0, 0), draw(0, 1, 0), draw(0, 0, 1)):
        assert not any(map(torch.equal, base, other))


def test_a_resumed_optimizer_is_fused_where_the_new_machine_can():
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    before, after = (torch.optim.AdamW([weight], lr, fused=lr > 0.1) for lr in (0.1, 0.2))
    before.step()
    saved = optimizer_state(before, {"w": weight})
    load_optimizer_state(after, {"w": weight}, *saved, with_groups=True)
    assert after.param_groups[0]["lr"] == 0.1
    after.found_inf = torch.ones(())  # only a fused optimizer may have it
    after.step()
    assert after.state[weight]["step"] == 1
