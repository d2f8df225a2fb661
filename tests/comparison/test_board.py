"""The board's figures are those of the records that it names."""

import re
from pathlib import Path

import pandas as pd
import pytest

from tread_zoo.comparison.findings import direction

DOCS = Path(__file__).parents[2] / "docs"
GOAL = re.compile(r"^## .*`(\w+)` of ([\d.]+)")
ROW = re.compile(
    r"^\| `(?P<backbone>\w+)` \| (?P<kind>dense|routed) \| (?P<met>\d+) of (?P<runs>\d+) "
    r"\| (?P<step>\S+) \| (?P<flops>\S+) \| (?P<seconds>\S+) \| (?P<best>\S+) "
    r"\| \[(?P<number>\d+)\]\((?P<entry>\S+)/results\.csv\) \|$"
)


def read_rows():
    metric = goal = None
    for line in (DOCS / "board.md").read_text().splitlines():
        if title := GOAL.match(line):
            metric, goal = title[1], float(title[2])
        elif line.startswith("| `"):
            yield metric, goal, ROW.match(line).groupdict()


ROWS = list(read_rows())


@pytest.mark.parametrize(
    ("metric", "goal", "row"), ROWS, ids=[f"{r['backbone']}-{r['kind']}" for _, _, r in ROWS]
)
def test_a_row_of_the_board_is_what_its_record_says(metric, goal, row):
    runs, curves = (
        pd.read_csv(DOCS / row["entry"] / f"{name}.csv") for name in ("results", "curves")
    )
    own = runs[
        (runs.backbone == row["backbone"]) & ((runs.routing == "none") == (row["kind"] == "dense"))
    ]
    scores = curves[(curves.metric == metric) & curves.folder.isin(own.folder)]
    lower = direction(metric) == "lower"
    there = scores[scores.value <= goal] if lower else scores[scores.value >= goal]
    met = there.loc[there.groupby("folder").step.idxmin()]
    assert (int(row["met"]), int(row["runs"])) == (len(met), len(own))
    assert float(row["best"]) == pytest.approx(
        scores.value.min() if lower else scores.value.max(), rel=2e-3
    )
    for field, unit in (("step", 1), ("flops", 1e12), ("seconds", 1)):
        if len(met):
            assert float(row[field]) == pytest.approx(met[field].mean() / unit, rel=0.01)
        else:
            assert row[field] == "-"


def test_every_entry_says_what_made_it():
    text = (DOCS / "board.md").read_text()
    for number in {row["number"] for _, _, row in ROWS}:
        (entry,) = re.findall(rf"^\| {number} \| `[0-9a-f]{{7,}}` \| .+ \| `.+` \|$", text, re.M)
        assert entry
