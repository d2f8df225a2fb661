"""Fusions on their way through a run: built, averaged, saved, resumed, restored, counted."""

import json
import logging

import pytest
import torch

from tests.small_run import parts_of, settings, train_small
from tread_zoo.comparison.results import read_run
from tread_zoo.evaluation.flops import count_flops, training_flops
from tread_zoo.routing import PathDrop, PendingRoute
from tread_zoo.seeding import make_generator
from tread_zoo.training.checkpoints import (
    CheckpointError,
    check_same_run,
    find_checkpoint,
    load_backbone,
)
from tread_zoo.training.loop import loss_of
from tread_zoo.training.parts import draw_step

SHORT = ("backbone=mamba", "training.num_steps=2", "evaluation.num_images=1")
PROJECT = "routing.rejoin=project"
DROP = "routing.path_drop_probability=0.5"


def drawn(parts, rank, micro_step):
    images, labels = next(parts.batches(0, 1, 0))
    return draw_step(
        parts, images, labels, rank=rank, num_ranks=2, micro_step=micro_step,
        device=torch.device("cpu"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folders of a fused run and of a plain one."""
    folder = tmp_path_factory.mktemp("runs")
    return [
        train_small(folder / name, *SHORT, *options)
        for name, options in (("fused", [PROJECT]), ("plain", []))
    ]


def test_the_routes_of_the_run_are_fused_and_nothing_else_changes():
    fused, plain = (parts_of(settings(*options)) for options in ([PROJECT], []))
    assert fused.backbone.fused_ranges == ((1, 3),)
    assert fused.settings["backbone"]["fusions"] == [[1, 3]]
    assert "fusions" not in plain.settings["backbone"]
    own, both = plain.backbone.state_dict(), fused.backbone.state_dict()
    assert all(torch.equal(own[key], both[key]) for key in own)


def test_what_was_trained_is_restored(trained):
    checkpoint = find_checkpoint(trained[0])
    assert checkpoint.meta["backbone"]["fusions"] == [[1, 4]]
    averaged, last = (load_backbone(checkpoint, weights) for weights in ("ema", "model"))
    fresh = parts_of(settings(*SHORT, PROJECT)).backbone.fusions.state_dict()
    assert len(fresh) == 4
    for key, weight in fresh.items():
        end, average = last.fusions.state_dict()[key], averaged.fusions.state_dict()[key]
        assert not torch.equal(end, weight), f"{key} is not trained"
        assert not torch.equal(end, average), f"{key} is not averaged"
    result = read_run(trained[0])
    assert result.flops_dense == count_flops(averaged, backward=True)
    assert result.flops_dense > read_run(trained[1]).flops_dense
    assert result.parameters == sum(p.numel() for p in averaged.parameters())


def test_dropped_paths_follow_seed_and_step_alone():
    parts = parts_of(settings(PROJECT, DROP))
    drops = [isinstance(drawn(parts, 0, k).routes[0], PathDrop) for k in range(24)]
    assert 4 < sum(drops) < 20
    assert drops == [isinstance(drawn(parts, 1, k).routes[0], PathDrop) for k in range(24)]
    always_routed = parts_of(settings(PROJECT))
    step = drops.index(False)
    one, other = drawn(parts, 0, step), drawn(always_routed, 0, step)
    assert torch.equal(one.routes[0].ids, other.routes[0].ids)
    assert torch.equal(one.draw.noise, other.draw.noise)


def test_a_run_with_dropped_paths_resumes_to_the_bit(run):
    options = [PROJECT, DROP, "training.schedule=constant", "evaluation.num_images=1"]
    parts = parts_of(settings(*options))
    drops = {isinstance(drawn(parts, 0, step).routes[0], PathDrop) for step in range(4)}
    assert drops == {True, False}
    unbroken = find_checkpoint(run("unbroken", *options, "training.num_steps=4"))
    run("parts", *options, "training.num_steps=2")
    resumed = find_checkpoint(run("parts", *options, "training.num_steps=4", "resume=latest"))
    for part in ("model", "ema", "optimizer"):
        left, right = unbroken.tensors(part), resumed.tensors(part)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), part


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (0, [], "backbone.fusions=[[1, 4]], not None"),
        (0, ["routing=none"], "backbone.fusions=[[1, 4]], not None"),
        (1, [PROJECT], "backbone.fusions=None, not [[1, 4]]"),
        (0, [PROJECT, "routing.start=1", "routing.end=2"], "[[1, 4]], not [[1, 2]]"),
    ],
)
def test_resuming_with_other_fusions_is_refused(trained, first, second, difference):
    checkpoint = find_checkpoint(trained[first])
    with pytest.raises(CheckpointError) as error:
        check_same_run(checkpoint, parts_of(settings(*SHORT, *second)).settings)
    assert difference in str(error.value)
    assert "Fusions follow routing.rejoin" in str(error.value)


def test_a_fused_run_may_be_finetuned_dense_at_rate_0(trained, caplog):
    dense = parts_of(settings(*SHORT, PROJECT, "routing.selection_rate=0.0"))
    with caplog.at_level(logging.WARNING):
        check_same_run(find_checkpoint(trained[0]), dense.settings)
    assert "routing.selection_rate=0.5, not 0.0" in caplog.text


def test_a_checkpoint_from_before_there_were_fusions_loads_and_resumes(trained):
    checkpoint = find_checkpoint(trained[1])
    for name in ("rejoin", "path_drop_probability"):
        del checkpoint.meta["routing"][name]
    assert "fusions" not in checkpoint.meta["backbone"]
    assert load_backbone(checkpoint).fused_ranges == ()
    check_same_run(checkpoint, parts_of(settings(*SHORT)).settings)


def test_dropped_paths_and_schedules_count_in_the_flops_of_a_run():
    """Half the run dense; of the routed steps a quarter drops the path, of the fused network."""
    halves = ["routing.dense_tail=0.5", "routing.path_drop_probability=0.25"]
    parts = parts_of(settings(PROJECT, *halves))
    network, grid = parts.backbone, parts.backbone.grid
    routes = parts.routing.draw(1, grid, make_generator("any"))
    dense, routed, dropped = (
        count_flops(network, routes=used, backward=True)
        for used in ((), routes, [PathDrop(*network.fused_ranges[0])])
    )
    assert dropped < routed < dense
    expected = 0.5 * dense + 0.5 * (0.75 * routed + 0.25 * dropped)
    assert training_flops(network, parts.routing, 6) == pytest.approx(expected)
    assert drawn(parts, 0, 5).routes == ()


def test_tokens_kept_by_importance_are_fused_and_dropped_like_others():
    parts = parts_of(settings(PROJECT, DROP, "routing.selector=norm"))
    kinds = set()
    for step in range(4):
        found = drawn(parts, 0, step)
        kinds.add(type(found.routes[0]))
        assert torch.isfinite(loss_of(parts.backbone, parts, found))
    assert kinds == {PathDrop, PendingRoute}


def test_a_fused_run_samples_with_its_path_dropped(run):
    folder = run("run", "routing.rejoin=project", "guidance=path_drop", "guidance.scale=1.5")
    sampling = json.loads((folder / "score.json").read_text())["protocol"]["sampling"]
    assert (sampling["guidance"], sampling["nfe"]) == ("path_drop", 4)
