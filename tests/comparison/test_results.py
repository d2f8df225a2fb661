"""Runs as tables."""

import csv
import json
import re
from pathlib import Path

import pandas as pd
import pytest

from tests.comparison.recorded import FLOPS, write_run
from tread_zoo.comparison import find_runs, read_curves, read_runs, read_table
from tread_zoo.comparison.results import write_table

ROOT = Path(__file__).parents[2]


def test_a_row_has_what_the_run_chose_spent_and_scored(tmp_path):
    folder = write_run(
        tmp_path / "a", routing="tread", seed=3, final=0.25, values={"fid": 8.0}, seconds=12.0
    )
    row = read_runs(folder).iloc[0]
    assert (row.backbone, row.routing, row.data, row.seed) == ("dit_tiny", "tread", "digits", 3)
    assert row.ended
    assert (row.steps, row.images, row.seconds, row.images_per_s) == (100, 6400, 12.0, 640.0)
    assert row.flops == pytest.approx(FLOPS["tread"] * 6400)
    assert row.flops_of_dense == pytest.approx(0.7)
    assert (row.held_out_loss, row.fid, row.real_fid) == (0.25, 8.0, 2.0)
    assert row.samples.endswith("step_00000100.png")
    runs = read_runs(folder)
    assert runs.attrs["settings"] == ["backbone", "routing", "data"]
    assert runs.attrs["metrics"] == ["held_out_loss", "fid"]


def test_columns_are_the_settings_in_which_runs_of_one_kind_differ(tmp_path):
    write_run(tmp_path / "dense", device="a", training={"log_every": 10})
    write_run(tmp_path / "mamba", backbone="mamba_tiny", tracker="local")
    write_run(tmp_path / "rate", routing={"name": "tread", "selection_rate": 0.25})
    blocks = {"name": "tread", "selector": {"name": "blocks", "size": 4}}
    write_run(tmp_path / "blocks", routing=blocks)
    write_run(tmp_path / "seed", seed=1)
    runs = read_runs(str(tmp_path / "*")).set_index("folder")
    assert runs.attrs["settings"] == [
        "backbone", "routing", "data", "routing.selection_rate", "routing.selector",
    ]  # fmt: skip
    assert runs["routing.selector"][str(tmp_path / "blocks")] == "blocks"
    assert runs["routing.selection_rate"][str(tmp_path / "rate")] == 0.25
    assert runs["routing.selection_rate"].isna()[str(tmp_path / "dense")], "it has no routes"


def test_settings_of_earlier_versions_have_todays_names(tmp_path):
    write_run(tmp_path / "new")
    old = write_run(tmp_path / "old", seed=1) / "config.json"
    config = json.loads(old.read_text())
    config["optimizer"]["decayed"] = config["optimizer"].pop("weight_decay_on")
    old.write_text(json.dumps(config))
    assert read_runs(str(tmp_path / "*")).attrs["settings"] == ["backbone", "routing", "data"]


def test_a_run_that_still_trains_has_a_row_as_far_as_it_got(tmp_path):
    folder = write_run(tmp_path / "a", ended=False)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:2], lines[2][:9]]))
    row = read_runs(folder).iloc[0]
    assert not row.ended
    assert (row.steps, row.loss) == (40, json.loads(lines[1])["loss"])
    assert set(read_curves(folder).step) == {20, 40}


def test_curves_are_over_steps_flops_and_seconds(tmp_path):
    curves = read_curves(write_run(tmp_path / "a", final=0.25, seconds=10.0))
    scored = curves[(curves.source == "score") & (curves.metric == "held_out_loss")]
    assert list(scored.step) == [20, 40, 60, 80, 100]
    assert list(scored.seconds) == pytest.approx([2, 4, 6, 8, 10])
    assert list(scored.flops) == pytest.approx([64 * FLOPS["none"] * step for step in scored.step])
    assert scored.value.iloc[-1] == 0.25
    last = curves[curves.step == 100].set_index("metric").value
    assert [last[f"held_out_loss_{i}"] for i in range(1, 5)] == [1.0, 0.75, 0.5, 0.25]
    assert "loss" in set(curves[curves.source == "log"].metric)


def test_a_curve_is_of_one_protocol(tmp_path):
    folder = write_run(tmp_path / "a")
    early, late = (folder / "scores.jsonl").read_text().split("\n", 1)
    other = json.loads(early)
    other["protocol"]["num_generated"] = 16
    (folder / "scores.jsonl").write_text(json.dumps(other) + "\n" + late)
    assert set(read_curves(folder).query("source == 'score'").step) == {40, 60, 80, 100}


def test_what_a_schedule_spends_early_and_late_is_counted_there(tmp_path):
    folder = write_run(tmp_path / "a", steps=100, every=20)
    facts = json.loads((folder / "facts.json").read_text())
    facts |= {"flops_by_stage": [[50, 1000.0], [100, 500.0]], "flops_routed": 750.0}
    (folder / "facts.json").write_text(json.dumps(facts))
    flops = read_curves(folder).groupby("step").flops.first() / 64
    assert list(flops) == [20e3, 40e3, 55e3, 65e3, 75e3]
    assert read_runs(folder).flops[0] == 64 * 75e3


def test_records_of_scores_may_stand_for_a_run_s_own(tmp_path):
    folder = write_run(tmp_path / "a", values={"fid": 8.0})
    record = json.loads((folder / "score.json").read_text())
    record["values"] = {"fid": 5.0}
    record["protocol"]["flops_per_image"] = 77
    (tmp_path / "guided.json").write_text(json.dumps(record))
    runs = read_runs([folder, folder], [folder / "score.json", tmp_path / "guided.json"])
    assert list(runs.fid) == [8.0, 5.0]
    assert list(runs.flops_per_sample) == [5000, 77]


@pytest.mark.parametrize(("weights", "measured"), [("ema", True), ("ema:0.1", False)])
def test_the_log_s_held_out_loss_is_of_the_weights_that_were_averaged_there(
    tmp_path, weights, measured
):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 100, "held_out_loss": 0.3}) + "\n")
    record = {"values": {"fid": 5.0}, "protocol": {"weights": weights}}
    (tmp_path / "score.json").write_text(json.dumps(record))
    runs = read_runs([folder], [tmp_path / "score.json"])
    assert ("held_out_loss" in runs) == measured


def test_runs_are_named_by_folder_or_pattern(tmp_path):
    first, odd = (write_run(tmp_path / name) for name in ("a,seed=0", "[odd]"))
    (tmp_path / "no_run").mkdir()
    assert find_runs(odd) == [odd], "its name is no pattern"
    assert find_runs([odd, str(tmp_path / "*")]) == [odd, first]
    for missing in (tmp_path / "no_run", "nowhere/*"):
        with pytest.raises(ValueError, match="holds no run"):
            read_runs(str(missing))


def test_a_run_is_laid_over_the_curve_of_its_recipe_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").symlink_to(ROOT / "configs")
    for seed, name in enumerate(("mine", "mine_seed0", "mine_seed1")):
        write_run(Path("runs", name), routing="tread", seed=seed, final=0.4 + 0.01 * seed)
    page = (ROOT / "docs" / "evaluation.md").read_text()
    section = page.partition("## Recipes and their curves")[2].partition("\n## ")[0]
    exec("".join(re.findall(r"```python\n(.*?)```", section, re.S)), names := {})
    loss = names["both"].query("metric == 'loss' and step == 100").iloc[0]
    assert loss.off == pytest.approx(0.8 / loss["mean"] - 1)
    curve = pd.read_csv("mine.csv").set_index(["source", "metric", "step"])
    assert curve["mean"]["score", "held_out_loss", 100] == pytest.approx(0.415)
    assert set(curve.n) == {2}


def test_no_text_of_a_table_is_a_formula_and_it_is_read_as_it_was(tmp_path):
    texts = ["=1+1", "+a", "-x", "@SUM(A1)", "\t=1", "'=1", "''-x", "plain", "'", "None", "a,\n=b"]
    numbers = [-1.5, 2.0, None, *range(3, len(texts))]
    table = pd.DataFrame({"=name": texts, "value": numbers, "ended": True})
    write_table(table, tmp_path / "results.csv")
    with (tmp_path / "results.csv").open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    cells = [header[0], *(row[0] for row in rows)]
    assert not [cell for cell in cells if cell[:1] in {"=", "+", "-", "@", "\t"}]
    assert [row[1] for row in rows[:3]] == ["-1.5", "2.0", ""]
    pd.testing.assert_frame_equal(read_table(tmp_path / "results.csv"), table)
    mixed = pd.DataFrame({"rate": ["-4", "-2..-1", 3]})
    write_table(mixed, tmp_path / "mixed.csv")
    assert list(read_table(tmp_path / "mixed.csv").rate) == ["-4", "-2..-1", "3"]
    write_table(table[:0], tmp_path / "empty.csv")
    assert list(read_table(tmp_path / "empty.csv")) == list(table)
