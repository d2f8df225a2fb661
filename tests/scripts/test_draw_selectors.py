"""The pictures and the table of the guide come from the code, and say what it does."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/draw_selectors.py"))


def test_survival_of_a_pattern_that_is_counted_by_hand():
    kept = torch.tensor([[[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]], dtype=torch.bool)
    beside, below, raster, _, holes = SCRIPT["survival"](kept)
    assert beside == pytest.approx(1 / 3)  # of 3 with a right neighbour: (0,0) has one that stays
    assert below == pytest.approx(1 / 3)  # of 3: (0,1)
    assert raster == pytest.approx(1 / 3)
    assert holes == pytest.approx(3 / 9)  # the last column


def test_pictures_and_table(tmp_path, capsys):
    SCRIPT["main"](["--out", str(tmp_path), "--side", "6", "--num-samples", "2000"])
    rows = {
        cells[0]: [float(cell) for cell in cells[1:]]
        for line in capsys.readouterr().out.splitlines()[2:-1]
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert set(rows) == set(SCRIPT["SELECTORS"])
    assert rows["random"][:2] == pytest.approx([0.5, 0.5], abs=0.03)
    assert rows["rows"][:2] == pytest.approx([1.0, 0.45], abs=0.03)
    assert rows["blocks 2"][:2] == pytest.approx([0.78, 0.78], abs=0.03)
    assert rows["blocks 4"][:2] == pytest.approx([0.91, 0.91], abs=0.03)
    for name in ("selectors.png", "orders.png"):
        assert min(Image.open(tmp_path / name).size) > 300


def test_the_guide_has_the_table_that_the_code_prints():
    """The measured table in docs/routing.md, to the Monte Carlo error of its two digits."""
    guide = (ROOT / "docs/routing.md").read_text()
    for name, options in SCRIPT["SELECTORS"].items():
        measured = SCRIPT["survival"](SCRIPT["draw_kept"](options, 2000, 8, 0.5))
        row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", guide, re.MULTILINE)
        assert row, f"docs/routing.md lacks {name}"
        printed = [float(cell) for cell in row[1].split("|")]
        assert printed == pytest.approx(measured, abs=0.03), name
