"""The comparison as a user meets it: one command, a page, the same command again."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from scripts import compare
from scripts.compare import make_cells, read_settings, split_sweeps
from tests.comparison.recorded import without_figures, write_run
from tests.small_run import fields_of
from tread_zoo.cli import CONFIGS, compose_settings

ROOT = Path(__file__).parents[2]
# What stands for scripts/train.py and scripts/evaluate.py: it copies a run, fails, or waits.
FAKE = """
import json, os, pathlib, shutil, signal, sys, time
given = {key: value.strip("'") for key, value in (text.split("=", 1) for text in sys.argv[1:])}
if pathlib.Path("closed").exists():  # the terminal
    def end(number, frame):
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(0.5)
        sys.exit(pathlib.Path("saved").touch())
    signal.signal(signal.SIGTERM, end)
    os.kill(os.getppid(), signal.SIGHUP)
    time.sleep(30)
if given.get("seed") == "9":
    sys.exit("error: out of luck.")
if "checkpoint" in given:
    record = json.loads(pathlib.Path(given["checkpoint"], "score.json").read_text())
    record["values"]["held_out_loss"] /= len(given["guidance"])
    record["protocol"]["flops_per_image"] = 1000 * len(given["guidance"])
    pathlib.Path(given["out"]).parent.mkdir(exist_ok=True)
    pathlib.Path(given["out"]).write_text(json.dumps(record))
else:
    shutil.copytree(f"made/{given['routing']}{given['seed']}", given["run_dir"])
"""
GRID = ("backbone=dit_tiny", "routing=none,tread", "seed=0,1", "compare.out=out")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder, in which cells run `FAKE`."""
    for routing, loss in (("none", 0.4), ("tread", 0.3)):
        for seed in range(3):
            folder = tmp_path / "made" / f"{routing}{seed}"
            write_run(folder, routing=routing, seed=seed, final=loss + 0.01 * seed)
    (tmp_path / "fake.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    for name in ("TRAIN", "EVALUATE"):
        monkeypatch.setattr(compare, name, tmp_path / "fake.py")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def call(monkeypatch, capsys):
    """Return a function that gives the command line and returns what was printed."""

    def call(*given, status=0):
        monkeypatch.setattr(sys, "argv", ["compare.py", *given])
        with pytest.raises(SystemExit) as left, without_figures():
            compare.main()
        said = capsys.readouterr()
        assert left.value.code == status, said.err
        return said.out + said.err

    return call


@pytest.mark.slow
def test_one_command_makes_the_page_and_again_only_reads(place, call):
    said = call(*GRID, "compare.jobs=2")
    text = (place / "out" / "report.md").read_text()
    assert text in said
    assert "2 settings of 1 backbone, 4 runs, on digits" in text
    assert re.search(r"\| dit_tiny \| routed \| 2 .* ahead \|", text)
    assert "4 cells, 4 of them done" in call(*GRID)
    assert "6 cells, 4 of them done" in call(*GRID[:2], "seed=0,1,2", GRID[-1])
    assert "training.batch_size=4" in call(*GRID, "training.batch_size=4", status=2)


@pytest.mark.slow
def test_overrides_of_runs_that_are_there_score_them_again(place, call):
    given = ("compare.runs=made/*0", "guidance=none,cfg", "compare.out=guided")
    text = call(*given)
    first, second, *_ = re.findall(r"^\| (?!-)(\S.*?) \| (\w+) \|", text, re.M)
    assert (first, second) == (
        ("tread, guidance none", "dense"), ("tread, guidance none", "routed"),
    )  # fmt: skip
    table = pd.read_csv("guided/results.csv").set_index(["routing", "guidance"])
    assert table.held_out_loss["none", "none"] == pytest.approx(0.1)
    assert table.held_out_loss["tread", "cfg"] == pytest.approx(0.1)
    assert "4 cells, 4 of them done" in call(*given)
    trained = place / "made/none0/checkpoints/step_00000100/checkpoint.json"
    trained.parent.mkdir(parents=True)
    trained.touch()  # again, after it was scored
    assert "4 cells, 2 of them done" in call(*given)
    text = call("compare.runs=made/*0", "guidance=cfg", "compare.out=again")
    assert "equal FLOPs" not in text, "on the way they were scored without guidance"


@pytest.mark.slow
def test_runs_that_are_scored_alike_are_seeds_of_one_setting(place, call):
    for seed in (0, 1):
        sampler = {"name": "euler", "num_steps": 4 + seed}
        write_run(place / f"runs/{seed}", seed=seed, sampler=sampler)
    text = call("compare.runs=runs/*", "sampler.num_steps=2", "guidance=none", "compare.out=alike")
    assert "1 setting of 1 backbone, 2 runs" in text


@pytest.mark.slow
def test_a_cell_that_fails_is_reported_and_the_others_are_compared(place, call):
    said = call("backbone=dit_tiny", "routing=none", "seed=0,9", "compare.out=out", status=1)
    assert "failed: backbone-dit_tiny_routing-none_seed-9" in said
    assert "error: out of luck." in said
    assert "dit_tiny dense" in (place / "out" / "report.md").read_text()


@pytest.mark.slow
def test_where_every_cell_fails_nothing_is_written(place, call):
    (place / "made").rename("later")
    assert "nothing to compare" in call(*GRID, status=2)
    assert not (place / "out" / "index.html").exists()
    (place / "later").rename("made")
    assert "4 runs" in call(*GRID, "optimizer.learning_rate=1e-3"), "no run is of other settings"


@pytest.mark.slow
def test_a_terminal_that_is_closed_ends_the_cells_gently_however_often_it_says_so(place, call):
    (place / "closed").touch()
    assert "the same command continues" in call(*GRID, status=130)
    assert (place / "saved").exists()


@pytest.mark.nightly
def test_cells_are_runs_of_the_real_script_and_go_on_after_a_kill(tmp_path):
    given = ("backbone=dit_tiny", "routing=tread", "seed=0", "training.num_steps=20",
             "training.sample_every=10", "training.log_every=1", "evaluation.num_images=10",
             "sampler.num_steps=2", "backbone.depth=6", "compare.out=out")  # fmt: skip
    command = [sys.executable, str(ROOT / "scripts" / "compare.py"), *given]
    killed = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("out/runs/*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    killed.kill()
    killed.wait()
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in tmp_path.glob("out/runs/*/train.log")]
    assert sum("SIGTERM" in log and "continues" in log for log in logs) == 1
    runs = pd.read_csv(tmp_path / "out" / "results.csv")
    assert list(runs.steps) == [20]
    assert runs.flops.notna().all()


def test_values_of_the_command_line_take_the_place_of_the_study_s():
    grids = [{"backbone": ["a", "b"], "seed": [0, 1]}, {"routing.selector": ["rows"], "seed": [0]}]
    given = ["seed=2,3", "backbone=dit_tiny", "data=npz", "objective=edm,flow"]
    sweeps, fixed = split_sweeps(grids, given, ["experiment=cifar10", "data=digits"])
    assert fixed == ["experiment=cifar10", "data=npz"]
    spanned = {"seed": ["2", "3"], "objective": ["edm", "flow"]}
    assert sweeps == [
        {"backbone": ["dit_tiny"], **spanned},
        {"routing.selector": ["rows"], **spanned},
    ]
    assert split_sweeps([{"seed": [0, 1]}], ["++seed=5"]) == ([{"seed": ["5"]}], [])
    given = ["guidance=none,{name: cfg, scale: 2}", "weights=ema:0.03,ema:0.1"]
    assert split_sweeps([{}], given)[0] == [
        {"guidance": ["none", "{name:cfg,scale:2}"], "weights": ["ema:0.03", "ema:0.1"]}
    ]


STUDIES = sorted(path.stem for path in (CONFIGS / "study").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_every_study_is_a_set_of_settings_that_can_be_built(study, monkeypatch):
    """Without hydra, which takes most of the time, where no preset is named."""

    def compose(script, texts, *config):
        preset = script != "train" or any(text.startswith("experiment=") for text in texts)
        return compose_settings(script, texts, *config) if preset else fields_of(*texts)

    monkeypatch.setattr(compare, "compose_settings", compose)
    cells = make_cells(read_settings([f"compare.study={study}", "compare.out=a=b,c"]), [])
    assert len({cell.result for cell in cells}) == len(cells) > 1
    assert f"run_dir='{cells[0].result.parent}'" in cells[0].command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["compare.sudy=rates"], "study"),
        (["compare.study=ratse"], "ratse"),
        (["compare.jobs=0"], "compare.jobs=0"),
        (["compare.runs="], "holds no run"),
        (["-m", "seed=0,1"], "-m"),
        (["seed=interval(0,1)"], "INTERVAL"),
        (["backbone=[dit_tiny,mamba]"], "backbone=dit_tiny,mamba"),
        (["compare.runs=nowhere/*"], "holds no run"),
        (["run_dir=there"], "set by the comparison"),
        (["training.num_step=5"], "num_steps"),
        (["backbone=dit_tiny,mambaa"], "'mamba'"),
        (["seed=0,x"], "seed='x'"),
        (["routing=tread", "training.label_dropout=0.1,2"], "label_dropout=2"),
        (["dit_tiny"], "field=value"),
        (["seed=ü"], "seed='ü'"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(given, message, call):
    """Before any cell runs, whichever of them is wrong."""
    error = call(*given, status=2)
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
