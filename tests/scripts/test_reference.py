"""Reference curves as a user meets them: made by one command, compared with by another."""

import json
import shutil
import sys

import pytest

from scripts import compare
from tests.comparison.reference.runs import run_from_curve
from tests.scripts.test_command_line import ROOT, call
from tread_zoo.comparison.reference import load_curve

RECIPES = ROOT / "configs" / "experiment"
CURVE = load_curve(RECIPES / "curves" / "digits_dit_tread.json")


def as_list(folders):
    return f"[{','.join(map(str, folders))}]"


@pytest.mark.slow
def test_a_curve_made_of_its_own_runs_is_that_curve_again(tmp_path):
    """Every number of the committed curve goes into run folders, and comes out of the script."""
    runs = [run_from_curve(tmp_path / f"seed{i}", CURVE, i) for i in range(len(CURVE.runs))]
    recipe = tmp_path / "recipes" / "digits_dit_tread.yaml"
    recipe.parent.mkdir()
    text = (RECIPES / recipe.name).read_text()
    recipe.write_text("".join(line for line in text.splitlines(True) if "images/s" not in line))
    shutil.copy(ROOT / "docs" / "recipes.md", tmp_path / "recipes.md")
    given = [f"recipe={CURVE.recipe}", f"runs={as_list(runs)}", f"hardware='{CURVE.hardware}'",
             f"configs={recipe.parent}", f"docs={tmp_path / 'recipes.md'}"]  # fmt: skip
    call("make_curve.py", *given, cwd=tmp_path)
    records = [
        json.loads((folder / "curves" / "digits_dit_tread.json").read_text())
        for folder in (recipe.parent, RECIPES)
    ]
    for record in records:
        assert record.pop("package")["version"]
    assert records[0] == records[1]
    assert recipe.read_text() == text
    row = next(line for line in (tmp_path / "recipes.md").read_text().splitlines()
               if line.startswith("| `digits_dit_tread`"))  # fmt: skip
    assert row in (ROOT / "docs" / "recipes.md").read_text()


def test_the_exit_status_says_whether_a_run_is_on_its_curve(tmp_path):
    on = run_from_curve(tmp_path / "on", CURVE, 1)
    off = run_from_curve(tmp_path / "off", CURVE, 1, factor=1.2)
    said = call("compare.py", "compare.to=reference", f"compare.runs=[{on}]", cwd=tmp_path)
    assert "on against digits_dit_tread: on the curve" in said
    assert {"reference.md", "reference.png"} <= {path.name for path in on.iterdir()}
    given = ["compare.to=reference", f"compare.runs={as_list([on, off])}", "compare.out=out"]
    said = call("compare.py", *given, cwd=tmp_path, expect=1)
    assert said.rstrip().endswith("off the curve: off")
    assert "off against digits_dit_tread: off the curve" in said
    assert (tmp_path / "out" / "off" / "reference.md").exists()
    assert not (off / "reference.md").exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["compare.to=reference"], "add compare.runs="),
        (["compare.to=referense", "compare.runs=[a]"], "Did you mean 'reference'"),
        (["compare.recipe=x", "compare.runs=[a]"], "compare.to=None"),
        (["to=reference", "compare.runs=[a]"], "compare.to=reference"),
        (["compare.to=reference", "compare.runs=[a]"], "a holds no run: config.json is missing"),
        (["compare.to=reference", "compare.runs=[x/a,y/a]", "compare.out=o"], "the name 'a'"),
        (
            ["compare.to=reference", "compare.runs=[a]", "compare.equal=flops"],
            "compare.equal=flops",
        ),
        (
            ["compare.to=reference", "compare.runs=[a]", "compare.study=rates"],
            "compare.study=rates",
        ),
    ],
)
def test_what_cannot_be_compared_is_said_in_one_line(given, words, monkeypatch, tmp_path, capsys):
    """With status 2: that of a run off its curve is 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["compare.py", *given])
    with pytest.raises(SystemExit) as left:
        compare.main()
    assert left.value.code == (1 if given[0] == "to=reference" else 2)
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
