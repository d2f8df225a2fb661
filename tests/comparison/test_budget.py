"""Equal budgets: the numbers of steps by hand, and the same ones when asked again."""

import json

import pytest

from tests.comparison.test_grid import SHORT, compose
from tread_zoo.comparison import budget, collect, equalise, expand
from tread_zoo.comparison.grid import parts_of
from tread_zoo.evaluation.flops import count_flops


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
    times = iter([0.5, 0.25])
    monkeypatch.setattr(budget, "time_a_step", lambda parts, device: next(times))
    for _ in range(2):  # the second time from the file
        timed = equalise(cells, compose, equal="seconds", seconds=60, out=tmp_path)
        assert steps_of(timed) == [120, 120, 240, 240]
    assert json.loads((tmp_path / "speeds.json").read_text()) == {
        "routing=none": 0.5, "routing=tread": 0.25,
    }  # fmt: skip


def test_a_step_is_timed_as_it_runs():
    parts = parts_of(compose(SHORT))
    before = [p.clone() for p in parts.backbone.parameters()]
    assert budget.time_a_step(parts, "cpu") > 0
    assert all(map(lambda a, b: a.equal(b), before, parts.backbone.parameters()))


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
    for cell in cells[:3]:
        cell.folder.mkdir(parents=True)
        settings = parts_of(compose(cell.overrides)).settings
        (cell.folder / "config.json").write_text(json.dumps(settings))
    found = collect([cell.folder for cell in cells[:3]])
    assert [cell.choices for cell in found] == [
        {"backbone": name, "routing": "tread", "routing.selection_rate": rate, "seed": "0"}
        for name, rate in (("dit_tiny", "0.25"), ("dit_tiny", "0.5"), ("mamba_tiny", "0.25"))
    ]
    with pytest.raises(ValueError, match="same settings and seed"):
        collect([cells[0].folder, cells[0].folder])
    with pytest.raises(ValueError, match="holds no run"):
        collect([tmp_path])
