"""The comparison as a user meets it: one command, a table, the same command again."""

import os
import sys

import pytest
from hydra import compose, initialize_config_dir

from scripts import compare
from scripts.compare import CONFIGS, split_sweeps
from tests.comparison.reference.runs import run_from_curve
from tests.scripts.test_command_line import ROOT, call
from tests.small_run import SMALL, counting_once, full_settings, parts_of
from tread_zoo.cli import as_keywords
from tread_zoo.comparison import expand_all
from tread_zoo.comparison.reference import load_curve

CURVE = load_curve(ROOT / "configs" / "experiment" / "curves" / "digits_dit_tread.json")
SHORT = [*SMALL, "training.num_steps=2", "training.warmup_steps=1", "compare.out=out"]


@pytest.mark.slow
def test_one_command_makes_the_table_and_again_only_reads(tmp_path):
    grid = ("backbone=dit_tiny", "routing=none,tread_random", "seed=3")
    said = call("compare.py", *SHORT, *grid, cwd=tmp_path)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "curves.csv", "index.html", "plots", "report.md", "results.csv", "results.json", "runs",
    ]  # fmt: skip
    text = (tmp_path / "out" / "report.md").read_text()
    assert text in said
    for routing in ("none", "tread_random"):
        assert f"| `dit_tiny` | `{routing}` |" in text
    again = call("compare.py", *SHORT, *grid, cwd=tmp_path)
    assert "2 runs, 2 of them done" in again
    assert (tmp_path / "out" / "report.md").read_text() == text


def test_values_of_the_command_line_take_the_place_of_the_study_s():
    grids = [{"backbone": ["a", "b"], "seed": [0, 1]}, {"routing.selector": ["rows"], "seed": [0]}]
    given = ["seed=2,3", "backbone=dit_tiny", "data=npz", "objective=edm,flow"]
    sweeps, fixed = split_sweeps(grids, given)
    assert fixed == ["data=npz"]
    spanned = {"seed": ["2", "3"], "objective": ["edm", "flow"]}
    assert sweeps == [
        {"backbone": ["dit_tiny"], **spanned},
        {"routing.selector": ["rows"], **spanned},
    ]


# Those with settings of their own are recipes, which tests/test_experiments.py builds.
STUDIES = sorted(path.stem for path in (CONFIGS / "study").glob("*.yaml"))
OF_RECIPES = {"fashion_mnist", "cifar10"}


@pytest.mark.parametrize("study", [study for study in STUDIES if study not in OF_RECIPES])
def test_every_study_is_a_set_of_settings_that_can_be_built(study, tmp_path):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("compare", overrides=[f"study={study}"])
    grids, fixed = split_sweeps(as_keywords(config)["grids"], [], config.fixed)
    kinds = {cell.overrides[:-1]: cell for cell in expand_all(grids, fixed, tmp_path)}
    assert config.title
    for cell in kinds.values():  # one seed of each
        assert parts_of(full_settings(*cell.overrides)).settings


def test_what_a_study_fixes_gives_way_to_the_command_line():
    grids = [{"backbone": ["a"], "seed": [0]}]
    shared = ["experiment=base/cifar10", "training.num_steps=5"]
    sweeps, fixed = split_sweeps(grids, ["training.num_steps=7", "device=cpu"], shared)
    assert sweeps == [{"backbone": ["a"], "seed": ["0"]}]
    assert fixed == ["experiment=base/cifar10", "training.num_steps=7", "device=cpu"]


def main(*given, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, given)])
    compare.main()


@pytest.fixture
def runs(tmp_path):
    """Two runs whose folders are named as a comparison names them."""
    for seed in range(2):
        run_from_curve(tmp_path / "runs" / f"backbone=dit_tiny,seed={seed}", CURVE, seed)
    return tmp_path / "runs"


def test_runs_that_are_there_are_given_by_a_pattern_or_by_name(runs, monkeypatch, tmp_path, capsys):
    out = f"compare.out={tmp_path / 'out'}"
    monkeypatch.setattr("tread_zoo.comparison.write_page", lambda *given, **keywords: None)
    with counting_once():
        main(f"compare.runs={runs}/*", out, "compare.equal=flops", monkeypatch=monkeypatch)
        assert capsys.readouterr().out.startswith("# 2 runs compared\n")
        one = runs / "backbone=dit_tiny,seed=1"
        main(f"compare.runs={one}", out, "compare.title=Mine", monkeypatch=monkeypatch)
        assert capsys.readouterr().out.startswith("# Mine\n")
    with pytest.raises(SystemExit):
        main(f"compare.runs=[{one}]", out, monkeypatch=monkeypatch)
    assert "need quotes in a list" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(f"compare.runs={runs}/*", out, "compare.equal=flop", monkeypatch=monkeypatch)
    assert "Did you mean 'flops'" in capsys.readouterr().err


@pytest.mark.parametrize(("to", "status"), [([], 1), (["compare.to=reference"], 2)])
def test_a_closed_pipe_is_an_error_and_no_verdict(monkeypatch, to, status):
    def off_its_curve(config):
        print("some words")
        sys.exit("off the curve: a")

    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(compare, "run", off_its_curve)
        with pytest.raises(SystemExit) as left:
            main(*to, monkeypatch=monkeypatch)
    assert left.value.code == status


def test_bad_words_are_one_line(tmp_path):
    said = call("compare.py", "seed=0,0", cwd=tmp_path, expect=1)
    assert said.strip() == "error: seed=0,0 must list different values."
    said = call("compare.py", "compare.outt=x", cwd=tmp_path, expect=1)
    assert said.startswith("error: ")
    assert "outt" in said
    assert not list(tmp_path.iterdir())
