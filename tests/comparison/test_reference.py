"""Whether a run lies on the curve of its recipe."""

from pathlib import Path

import pandas as pd
import pytest

from tests.comparison.recorded import write_lines, write_run
from tread_zoo.comparison import compare_with_curve, make_curve

CURVES = sorted((Path(__file__).parents[2] / "configs/experiment/curves").glob("*.csv"))

HELD_OUT = {"held_out_loss", *(f"held_out_loss_{i}" for i in range(1, 5))}  # and by level


def follow(folder, curve, factor=1.0):
    """Write a run whose logged values are the means of a curve times `factor`."""
    write_run(folder, ended=False)
    logged = curve[curve.source == "log"]
    lines = [
        {"step": int(step), **dict(zip(rows.metric, factor * rows["mean"], strict=True))}
        for step, rows in logged.groupby("step")
    ]
    write_lines(folder / "metrics.jsonl", lines)
    return folder


def test_a_new_seed_is_on_the_curve_and_another_learning_is_not(tmp_path):
    finals = (0.400, 0.403, 0.401)
    runs = [write_run(tmp_path / f"{i}", seed=i, final=f) for i, f in enumerate(finals)]
    curve = make_curve(runs[:2])
    assert set(curve.columns) == {"source", "metric", "step", "mean", "std", "n"}
    assert set(curve.metric) == {"loss", *HELD_OUT}
    assert compare_with_curve(runs[2], curve).on.all()
    off = compare_with_curve(write_run(tmp_path / "off", final=0.45), curve)
    assert not off.on.any()
    assert off.value.iloc[0] > off["mean"].iloc[0] + off.band.iloc[0]


def test_a_loss_that_is_not_finite_is_off(tmp_path):
    curve = pd.read_csv(CURVES[0], comment="#")
    folder = follow(tmp_path / "run", curve)
    text = (folder / "metrics.jsonl").read_text()
    value = str(curve["mean"][3])
    assert value in text
    (folder / "metrics.jsonl").write_text(text.replace(value, "NaN", 1))
    verdicts = compare_with_curve(folder, curve)
    assert not verdicts.on.all()
    assert verdicts.on.any()


@pytest.mark.parametrize("path", CURVES[::4], ids=lambda path: path.stem)
def test_a_committed_curve_lies_on_itself_and_not_on_one_ten_percent_higher(path, tmp_path):
    curve = pd.read_csv(path, comment="#")
    assert compare_with_curve(follow(tmp_path / "same", curve), curve).on.all()
    higher = compare_with_curve(follow(tmp_path / "higher", curve, 1.1), curve)
    assert not higher[higher.metric == "held_out_loss"].on.any()


def test_the_page_of_recipes_has_the_numbers_of_the_curves():
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    for path in CURVES:
        last = pd.read_csv(path, comment="#").query("metric == 'held_out_loss'").iloc[-1]
        rows = (line for line in text.splitlines() if line.startswith("| `"))
        recipe = path.stem.rpartition("_")[0]
        row = next(x for x in rows if "_".join(x.split("`")[1:4:2]) == recipe)
        assert f" {last['mean']:.4f} ± {last['std']:.4f} |" in row


def test_what_a_difference_of_settings_changes_is_not_compared(tmp_path):
    runs = [write_run(tmp_path / f"{i}", seed=i) for i in range(2)]
    curve = make_curve(runs)
    assert "loss" not in set(compare_with_curve(runs[0], curve, ["routing"]).metric)
    of_samples = pd.DataFrame([{"source": "score", "metric": "fid", "step": 100, "mean": 4.0,
                                "std": 0.1, "n": 2}])  # fmt: skip
    scored = write_run(tmp_path / "scored", values={"fid": 4.1})
    assert compare_with_curve(scored, of_samples).on.all()
    with pytest.raises(ValueError, match="nothing in common"):
        compare_with_curve(scored, of_samples, ["evaluation.num_images"])


def test_training_losses_of_other_windows_are_not_compared(tmp_path):
    curve = make_curve([write_run(tmp_path / f"{i}", seed=i, every=20) for i in range(2)])
    verdicts = compare_with_curve(write_run(tmp_path / "finer", every=10), curve)
    assert set(verdicts.metric) == HELD_OUT


def test_a_curve_is_of_seeds_of_one_recipe(tmp_path):
    first = write_run(tmp_path / "a")
    with pytest.raises(ValueError, match="two seeds"):
        make_curve(first)
    other = write_run(tmp_path / "b", seed=1, routing="tread")
    with pytest.raises(ValueError, match="routing"):
        make_curve([first, other])
