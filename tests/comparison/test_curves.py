"""Scores on the way: read from runs, drawn against what was spent, written for other programs."""

import csv
import dataclasses
import json

import pytest

from tests.comparison.test_page import groups_of
from tests.comparison.test_page import run as end_of
from tests.comparison.test_table import cell
from tread_zoo.comparison import plots, write_page, write_report
from tread_zoo.comparison.curves import drawn_curves
from tread_zoo.comparison.results import score_curves
from tread_zoo.comparison.words import read_out


def scored(loss, fid, *, flops=4, **curves):
    """A run of 10 steps and 100 images that was scored in its middle and at its end."""
    scores = {"held_out_loss": ((5, 2 * loss), (10, loss)), "fid": ((5, 3 * fid), (10, fid))}
    return dataclasses.replace(end_of(loss, flops=flops), scores={**scores, **curves}, seconds=50.0)


RUNS = {
    ("none", 0): scored(0.40, 1.0),
    ("none", 1): scored(0.42, 1.2),
    ("tread", 0): scored(0.43, 1.1, flops=3),
    ("tread", 1): scored(0.44, 1.1, flops=3),
}


def records(folder, **changed):
    """Write the scores of a run, with another protocol in the second, and return its folder."""
    protocol = {"extractor": "e", "num_generated": 70}
    rows = [
        {"values": {"fid": 9.0 / step, "kid": value}, "protocol": {**protocol, "step": step}}
        for step, value in ((2, 0.5), (4, float("nan")), (6, 0.25))
    ]
    rows[1]["protocol"] |= changed
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_curves_are_what_the_run_wrote(tmp_path):
    """Those of a whole run: tests/training/test_scoring.py."""
    assert score_curves(tmp_path) == {}, "a run from before there were scores on the way"
    assert score_curves(records(tmp_path)) == {
        "fid": ((2, 4.5), (4, 2.25), (6, 1.5)), "kid": ((2, 0.5), (6, 0.25)),
    }  # fmt: skip


def test_one_curve_has_one_protocol(tmp_path):
    with pytest.raises(ValueError, match=r"step 4 was scored with num_generated=500.*keep the"):
        score_curves(records(tmp_path, num_generated=500))


def test_runs_of_different_protocols_share_no_plot(tmp_path):
    other = scored(0.4, 1.0)
    other = dataclasses.replace(other, protocol={**other.protocol, "extractor": "another"})
    runs = {**RUNS, ("tread", 1): other}
    with pytest.raises(ValueError, match="scored with extractor=another"):
        write_page(
            [cell(*key) for key in runs], list(runs.values()), tmp_path, title="", command=""
        )
    assert not list(tmp_path.iterdir())


def lines_of(path, runs, monkeypatch):
    """Draw the plots of runs; return the lines of each panel by label: places, values, style."""
    drawn = {}
    original = plots._save

    def watched(figure, to):
        drawn[to.stem] = {
            axes.get_xlabel().partition(" ")[0]: {
                line.get_label(): (list(line.get_xdata()), list(line.get_ydata()),
                                   line.get_color(), line.get_linestyle())
                for line in axes.lines
            }
            for axes in figure.axes
        }  # fmt: skip
        if to.name.startswith("fid_"):
            original(figure, to)

    monkeypatch.setattr(plots, "_save", watched)
    plots.draw_plots(groups_of(runs), path)
    return drawn


def test_each_score_is_drawn_against_steps_flops_and_seconds(tmp_path, monkeypatch):
    """Places by hand: 10 images a step of 4 or 3 FLOPs; 5 seconds a step."""
    drawn = lines_of(tmp_path, RUNS, monkeypatch)
    assert (tmp_path / "fid_on_the_way.png").read_bytes().startswith(b"\x89PNG")
    assert "held_out_loss_on_the_way" in drawn
    panels = drawn["fid_on_the_way"]
    expected = {"optimizer": [5, 10], "training": [150e-12, 300e-12], "seconds": [25, 50]}
    assert panels.keys() == expected.keys()
    for axis, places in expected.items():
        found = panels[axis]
        assert found["tread"][0] == pytest.approx(places)
        assert found["tread"][1] == pytest.approx([3.3, 1.1])
        assert found["none"][1] == pytest.approx([3.3, 1.1])
        assert found["held-out real images: 0.39"][1] == [0.39, 0.39]
    assert panels["training"]["none"][0] == pytest.approx([200e-12, 400e-12])


def test_real_images_far_from_all_curves_are_said_and_not_drawn(tmp_path, monkeypatch):
    far = {key: dataclasses.replace(run, real={"fid": 0.01}) for key, run in RUNS.items()}
    far = {k: dataclasses.replace(r, scores={"fid": ((5, 9.0), (10, 8.0))}) for k, r in far.items()}
    panels = lines_of(tmp_path, far, monkeypatch)["fid_on_the_way"]
    assert panels["optimizer"]["held-out real images: 0.01 (not drawn)"][3] == "None"


def test_a_backbone_has_one_colour_and_only_dense_runs_are_solid(tmp_path, monkeypatch):
    from tread_zoo.comparison import Cell, group_runs

    choices = [(b, r) for r in ("none", "tread", "own") for b in ("dit", "mamba")]
    cells = [Cell({"routing": r, "backbone": b}, (), tmp_path) for b, r in choices]
    looks = plots._looks(group_runs(cells, [scored(0.4, 1.0)] * len(cells)))
    by_choice = dict(zip(choices, looks, strict=True))
    for backbone in ("dit", "mamba"):
        assert len({by_choice[backbone, r]["color"] for r in ("none", "tread", "own")}) == 1
        assert by_choice[backbone, "none"]["linestyle"] == "-"
    assert by_choice["dit", "none"]["color"] != by_choice["mamba", "none"]["color"]
    styles = {by_choice["dit", r]["linestyle"] for r in ("none", "tread", "own")}
    assert len(styles) == 3


def test_losses_by_one_draw_and_by_eight_share_no_plot():
    """One run without scores on the way: the single draw is what all of them have."""
    single = ((5, 0.9), (10, 0.8))
    runs = [dataclasses.replace(run, curve=single) for run in RUNS.values()]
    assert drawn_curves(runs)["held_out_loss"](runs[0]) == runs[0].scores["held_out_loss"]
    runs[1] = dataclasses.replace(runs[1], scores={})
    assert {drawn_curves(runs)["held_out_loss"](run) for run in runs} == {single}
    often = [dataclasses.replace(run, curve=(*single, (15, 0.7))) for run in RUNS.values()]
    assert drawn_curves(often)["held_out_loss"](often[0]) == often[0].curve, "more points"
    ended = [dataclasses.replace(run, scores={"fid": ((10, 1.0),)}) for run in RUNS.values()]
    assert drawn_curves(ended) == {}, "a score at the end alone is no curve"


def test_words_compare_distances_at_equal_flops():
    """The dense runs had spent as much at 7.5 steps: half way from 3.0 to 1.0, and 3.6 to 1.2."""
    (tread,) = read_out(groups_of(RUNS))
    assert "its loss was 0.6150, against 0.4350, lower with every seed" in tread
    assert "its Fréchet distance was 2.20, against 1.10, lower with every seed" in tread
    assert tread.count("learning rate had not come to its end") == 1


def test_every_point_is_written_with_what_it_cost(tmp_path):
    runs = {**RUNS, ("none", 0): dataclasses.replace(RUNS["none", 0], curve=((5, 0.9),))}
    write_report([cell(*key) for key in runs], list(runs.values()), tmp_path, title="", command="")
    with (tmp_path / "curves.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 4 * 4 + 1
    assert {
        "routing": "tread", "seed": "1", "score": "fid", "step": "5", "training_flops": "150",
        "seconds": "25.0", "value": str(3 * 1.1),
    } in rows  # fmt: skip
    assert [r["value"] for r in rows if r["score"] == "held_out_loss_single_draw"] == ["0.9"]
    (first, *_) = json.loads((tmp_path / "results.json").read_text())
    assert first["scores"]["fid"] == [[5, 3.0], [10, 1.0]]
