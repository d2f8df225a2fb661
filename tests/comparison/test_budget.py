"""Equal budgets: the numbers of steps by hand, and the same ones when asked again."""

import json
from dataclasses import replace

import pytest

from tests.comparison.test_grid import SHORT, compose
from tests.comparison.test_table import RESULT, cell
from tread_zoo.comparison import budget, check_equal_runs, collect, equalise, expand
from tread_zoo.comparison.grid import parts_of
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.seeding import make_generator
from tread_zoo.training.parts import draw_routes


def steps_of(cells):
    return [int(cell.overrides[-1].removeprefix("training.num_steps=")) for cell in cells]


def cells_of(tmp_path, **sweeps):
    fixed = [*SHORT, "training.num_steps=100"]
    return expand(sweeps, fixed, tmp_path)


def test_equal_flops_gives_the_cheaper_more_steps(tmp_path):
    cells = cells_of(tmp_path, routing=["none", "tread"], seed=["0", "1"])
    found = steps_of(equalise(cells, compose, equal="flops", seconds=None, out=tmp_path))
    parts = parts_of(compose(cells[2].overrides))
    routes = parts.routing.draw(1, parts.backbone.grid, None)
    dense = count_flops(parts.backbone, backward=True)
    routed = count_flops(parts.backbone, routes=routes, backward=True)
    assert found == [100, 100, round(100 * dense / routed), round(100 * dense / routed)]
    assert found[2] > 110


def test_equal_seconds_times_each_setting_once(tmp_path, monkeypatch):
    cells = cells_of(tmp_path, routing=["none", "tread"], seed=["0", "1"])
    times = iter([0.5, 0.25, 1.0, 2.0])
    monkeypatch.setattr(budget, "time_a_step", lambda parts, device: next(times))
    (tmp_path / "speeds.json").write_text('{"routing=none": 9.0}')  # as earlier versions kept them
    for _ in range(2):  # the second time from the file
        timed = equalise(cells, compose, equal="seconds", seconds=60, out=tmp_path)
        assert steps_of(timed) == [120, 120, 240, 240]

    def dense(*overrides):
        fixed = [*SHORT, "training.num_steps=100", *overrides]
        (cell,) = expand({"routing": ["none"]}, fixed, tmp_path)
        return steps_of(equalise([cell], compose, equal="seconds", seconds=60, out=tmp_path))

    assert dense("training.learning_rate=0.5", "seed=7") == [120], "as fast"
    assert dense("training.batch_size=4") == [60], "timed anew"
    monkeypatch.setattr(budget, "_name_of_cpu", lambda: "another")
    assert dense() == [30], "timed anew"


def timed_as(monkeypatch, *overrides):
    """Return the seconds of a step where a routed one takes 1 and a dense one 3."""
    now, seen = [0.0], []

    def optimize(run, batches, step, rate, window):
        drawn = draw_routes(run.parts, step, 1, make_generator("test", 0))
        now[0] += 1.0 if drawn else 3.0
        seen.append(step)

    monkeypatch.setattr(budget, "optimize", optimize)
    monkeypatch.setattr(budget.time, "perf_counter", lambda: now[0])
    parts = parts_of(compose([*SHORT, "training.num_steps=100", "routing=tread", *overrides]))
    return budget.time_a_step(parts, "cpu"), parts


@pytest.mark.parametrize(
    ("overrides", "seconds"),
    [
        ([], 1.0),
        (["routing.warm_start=0.6"], 0.6 * 3 + 0.4),
        (["routing.probability=0.25"], 0.75 * 3 + 0.25),
    ],
)
def test_a_step_takes_its_mean_over_the_run(monkeypatch, overrides, seconds):
    assert timed_as(monkeypatch, *overrides)[0] == pytest.approx(seconds)


def test_each_rate_of_a_schedule_is_timed():
    """From 0.25 to 0.5 in steps of 1/16: five rates; a tenth of the run is dense."""
    given = ["routing.schedule=linear", "routing.final_rate=0.5", "routing.selection_rate=0.25"]
    all_of = [*SHORT, "training.num_steps=100", "routing=tread", "routing.warm_start=0.1", *given]
    parts = parts_of(compose(all_of))
    kinds = budget.kinds_of_steps(parts)
    assert len(kinds) == 6
    assert sum(share for share, _ in kinds) == pytest.approx(1)
    assert kinds[0] == (pytest.approx(0.1), 0)


def test_a_step_is_timed_as_it_runs():
    """By the loop's own step: clipped, accumulated, averaged; no weight moves."""
    more = ["training.gradient_accumulation_steps=2", "training.max_grad_norm=1"]
    parts = parts_of(compose([*SHORT, *more]))
    before = [p.clone() for p in parts.backbone.parameters()]
    assert budget.time_a_step(parts, "cpu") > 0
    assert all(map(lambda a, b: a.equal(b), before, parts.backbone.parameters()))


def test_runs_that_are_there_must_have_spent_the_same(tmp_path):
    cells = [cell("none", 0), cell("tread", 0), cell("own", 0)]
    runs = [
        replace(RESULT, flops=3, images=images, seconds=seconds, failed=failed)
        for images, seconds, failed in ((1000, 100.0, ""), (1015, 109.0, ""), (2, 1.0, "nan"))
    ]
    for equal in ("steps", "flops", "seconds"):
        check_equal_runs(cells, runs, equal)
    apart = [runs[0], replace(runs[1], images=1030, seconds=120.0)]
    with pytest.raises(ValueError, match=r"none0 trained for 3000 flops, tread0 for 3090"):
        check_equal_runs(cells[:2], apart, "flops")
    with pytest.raises(ValueError, match=r"none0 trained for 100 seconds, tread0 for 120"):
        check_equal_runs(cells[:2], apart, "seconds")


@pytest.mark.parametrize(
    ("equal", "seconds", "words"),
    [
        ("flop", None, r"compare\.equal='flop'.*flops"),
        ("seconds", None, "compare.seconds=None .*needs a number"),
        ("seconds", -1.0, "compare.seconds=-1"),
        ("flops", 5.0, "the others take none"),
    ],
)
def test_budgets_that_cannot_be(tmp_path, equal, seconds, words):
    with pytest.raises(ValueError, match=words):
        equalise(cells_of(tmp_path), compose, equal=equal, seconds=seconds, out=tmp_path)


def test_several_processes_do_not_each_find_their_own_number(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="times the steps of one process"):
        equalise(cells_of(tmp_path), compose, equal="seconds", seconds=9.0, out=tmp_path)


def test_runs_that_are_there_are_told_apart_by_what_differs(tmp_path):
    sweeps = {"backbone": ["dit", "mamba"], "routing.selection_rate": ["0.25", "0.5"]}
    cells = expand(sweeps, [*SHORT, "routing.selector=rows"], tmp_path)
    for one in cells[:3]:
        one.folder.mkdir(parents=True)
        settings = parts_of(compose(one.overrides)).settings
        (one.folder / "config.json").write_text(json.dumps(settings))
    found = collect([cell.folder for cell in cells[:3]])
    assert [cell.choices for cell in found] == [
        {"backbone": name, "routing": "tread", "routing.selection_rate": rate, "seed": "0"}
        for name, rate in (("dit_tiny", "0.25"), ("dit_tiny", "0.5"), ("mamba_tiny", "0.25"))
    ]
    with pytest.raises(ValueError, match="same settings and seed"):
        collect([cells[0].folder, cells[0].folder])
    with pytest.raises(ValueError, match="holds no run"):
        collect([tmp_path])
