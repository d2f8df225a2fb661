"""The comparison as a user meets it: one command, a table, the same command again."""

import os

import pytest

from tests.scripts.test_command_line import call
from tests.small_run import SMALL

SHORT = [*SMALL, "training.num_steps=2", "training.warmup_steps=1", "compare.out=out"]


@pytest.mark.slow
def test_one_command_makes_the_table_and_again_only_reads(tmp_path):
    grid = ("backbone=dit_tiny", "routing=none,tread_random", "seed=3")
    said = call("compare.py", *SHORT, *grid, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "report.md", "results.csv", "results.json", "runs",
    ]  # fmt: skip
    text = (tmp_path / "out" / "report.md").read_text()
    assert text in said
    for routing in ("none", "tread_random"):
        assert f"| `dit_tiny` | `{routing}` |" in text
    again = call("compare.py", *SHORT, *grid, cwd=tmp_path)
    assert "2 runs, 2 of them done" in again
    assert (tmp_path / "out" / "report.md").read_text() == text


def test_bad_words_are_one_line(tmp_path):
    said = call("compare.py", "seed=0,0", cwd=tmp_path, expect=1)
    assert said.strip() == "error: seed=0,0 must list different values."
    said = call("compare.py", "compare.outt=x", cwd=tmp_path, expect=1)
    assert said.startswith("error: ")
    assert "outt" in said
    assert not list(tmp_path.iterdir())
