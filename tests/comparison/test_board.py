"""The board's figures are those of the records that it names."""

import re
from pathlib import Path

import pandas as pd
import pytest

from tread_zoo.comparison.findings import direction, spent_until

DOCS = Path(__file__).parents[2] / "docs"
GOAL = re.compile(r"^## .*`(\w+)` of ([\d.]+)")
ROW = re.compile(
    r"^\| `(?P<backbone>\w+)` \| (?P<kind>dense|routed) \| (?P<runs>\d+) \| (?P<value>\S+) "
    r"\| (?P<step>\S+) \| (?P<flops>\S+) \| (?P<seconds>\S+) "
    r"\| \[(?P<number>\d+)\]\((?P<entry>\S+)/results\.csv\) \|$"
)


def read_rows(text):
    metric = goal = None
    for line in text.splitlines():
        if title := GOAL.match(line):
            metric, goal = title[1], float(title[2])
        elif line.startswith("| `"):
            yield metric, goal, ROW.match(line).groupdict()


def check_row(metric, goal, row, runs, curves):
    """Raise AssertionError where a row is not what its records say, or is none."""
    own = runs[
        (runs.backbone == row["backbone"]) & ((runs.routing == "none") == (row["kind"] == "dense"))
    ]
    scores = curves[(curves.metric == metric) & curves.folder.isin(own.folder)]
    met = spent_until(scores, goal, direction(metric))
    assert met is not None, "the goal is not met by three runs or more"
    assert int(row["runs"]) == len(met) == len(own)
    for field, unit in (("value", 1), ("step", 1), ("flops", 1e12), ("seconds", 1)):
        assert float(row[field]) == pytest.approx(met[field].mean() / unit, rel=0.01)


ROWS = list(read_rows((DOCS / "board.md").read_text()))


def test_a_row_of_the_board_is_what_its_record_says():
    for metric, goal, row in ROWS:
        tables = (pd.read_csv(DOCS / row["entry"] / f"{n}.csv") for n in ("results", "curves"))
        check_row(metric, goal, row, *tables)


def test_every_entry_says_what_made_it():
    text = (DOCS / "board.md").read_text()
    for number in {row["number"] for _, _, row in ROWS}:
        (entry,) = re.findall(rf"^\| {number} \| `[0-9a-f]{{7,}}` \| .+ \| `.+` \|$", text, re.M)
        assert entry


def records(*runs):
    """Results and curves of dense runs of `dit_tiny`, whose scores come every 100 steps."""
    folders = [f"run{i}" for i in range(len(runs))]
    results = pd.DataFrame({"folder": folders, "backbone": "dit_tiny", "routing": "none"})
    curves = pd.DataFrame([
        {"folder": folder, "metric": "label_accuracy", "step": 100 * k, "flops": 1e12 * k,
         "seconds": k, "value": value}
        for folder, run in zip(folders, runs, strict=True)
        for k, value in enumerate(run, 1)
    ])  # fmt: skip
    return results, curves


def entry(runs, value):
    fields = {"backbone": "dit_tiny", "kind": "dense", "runs": runs, "value": value}
    return {**fields, "step": 200, "flops": 2, "seconds": 2}


def test_three_runs_beyond_doubt_are_an_entry_and_a_lucky_one_is_none():
    good = ([0.9, 0.981, 0.982], [0.9, 0.979, 0.98], [0.9, 0.98, 0.981])
    check_row("label_accuracy", 0.97, entry(3, 0.98), *records(*good))
    lucky, plain = [0.9, 0.999, 0.999], [0.9, 0.969, 0.969]
    for few in ([lucky], [lucky, lucky], [lucky, plain, plain]):
        with pytest.raises(AssertionError, match="not met"):
            check_row("label_accuracy", 0.97, entry(len(few), 0.98), *records(*few))
