"""A part of every kind from a file outside the project: trained, sampled, resumed, remembered."""

import csv
import json
import os
import re
from pathlib import Path

import pytest

from tests.data.tables import write_features
from tests.processes import run_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "examples" / "plugin"
SMALL = [
    "training.num_steps=2", "training.batch_size=8", "training.precision=fp32", "device=cpu",
    "training.log_every=1", "sampler.num_steps=1", "backbone.depth=3", "backbone.hidden_size=16",
]  # fmt: skip
# As a user would type it.
DOCUMENTED = [
    "plugins=[my_plugin]", "routing.selector={name: checkerboard, parity: 1}",
    "optimizer=sign_sgd", "optimizer.learning_rate=1e-3", "evaluation.metrics=[fid,mean_gap]",
]  # fmt: skip
OTHERS = [
    "plugins=[my_plugin]", "backbone=dit", "objective=huber_flow", "objective.delta=0.5",
    "sampler=midpoint", "guidance=rising", "guidance.scale=1.5", "lr_schedule=inverse_sqrt",
    "lr_schedule.warmup_steps=1", "data=stripes", "data.num_images=128", "tracker=csv",
    "alignment=regression", "alignment.block=0",
    "evaluation.metrics=[]", "evaluation.num_images=4",
]  # fmt: skip


def run(script, *overrides, plugin=True, cwd=ROOT):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([*([str(PLUGIN)] if plugin else []), str(ROOT)])
    return run_python(ROOT / "scripts" / script, *overrides, cwd=cwd, env=env)


def numbers(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_documented_command(tmp_path):
    folder = tmp_path / "run"
    done = run("train.py", *DOCUMENTED, *SMALL, "evaluation.num_images=70", f"run_dir={folder}")
    assert done.returncode == 0, done.stderr
    settings = json.loads((folder / "config.json").read_text())
    assert settings["routing"]["selector"] == {"name": "checkerboard", "parity": 1}
    assert settings["optimizer"]["learning_rate"] == 1e-3
    values = json.loads((folder / "score.json").read_text())["values"]
    assert values["mean_gap"] > 0
    assert values["fid"] > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("others") / "run"
    done = run("train.py", *OTHERS, *SMALL, f"run_dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_every_other_kind(trained):
    logged = {name for row in numbers(trained) for name in row}
    assert {"beyond_delta", "alignment_loss"} <= logged
    with (trained / "numbers.csv").open(newline="") as stream:
        assert {"loss", "beyond_delta"} <= {name for _, name, _ in csv.reader(stream)}


@pytest.mark.slow
def test_a_checkpoint_says_which_module_it_needs(trained):
    checkpoint = f"checkpoint={trained}"
    done = run("sample.py", checkpoint, "num_images=4", plugin=False)
    assert done.returncode == 1
    assert "plugins=[my_plugin]" in done.stderr
    assert done.stderr.count("\n") == 1
    done = run("sample.py", checkpoint, "num_images=4", "plugins=[my_plugin]")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_yaml_of_ones_own_names_the_plug_in(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n  - override /optimizer: sign_sgd\n"
        "plugins: [my_plugin]\nseed: 3\n"
    )
    done = run("train.py", *SMALL, "experiment=mine", "--config-dir", str(tmp_path), "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "name: sign_sgd" in done.stdout
    assert "seed: 3" in done.stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A folder with the parts of docs/extending.md in one file."""
    folder = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/extending.md").read_text(), re.S)
    parts = [block for block in blocks if "@register" in block]
    assert len(parts) == 5
    (folder / "mine.py").write_text("\n".join(parts))
    return folder


@pytest.mark.slow
def test_the_parts_of_the_page_train_from_the_current_folder(page):
    done = run(
        "train.py", "plugins=[mine]", "data=bars", "objective=cosine", "guidance=unlabelled",
        "backbone=dit", *SMALL, "evaluation.num_images=4", "evaluation.metrics=[]", "run_dir=run",
        plugin=False, cwd=page,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logged = {name for row in numbers(page / "run") for name in row}
    assert {"largest", "held_out_loss"} <= logged


@pytest.mark.slow
def test_help_and_comparisons_know_the_parts_of_the_current_folder(page):
    given = ["plugins=[mine]", "guidance=unlabelled"]
    done = run("train.py", *given, "--help", plugin=False, cwd=page)
    assert "guidance.scale=2.0" in done.stdout, done.stderr
    small = [*SMALL, "evaluation.num_images=4", "evaluation.metrics=[]", "compare.out=out"]
    done = run(
        "compare.py", *given, "backbone=dit", "seed=0", "routing=none", *small,
        plugin=False, cwd=page,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_objective_and_the_alignment_of_the_page_train_in_half_precision(page):
    done = run(
        "train.py", "plugins=[mine]", "data=table", f"data.path={write_features(page)}",
        "objective=cosine", "alignment=pooled", "alignment.block=0", "backbone=dit", *SMALL,
        "training.precision=bf16", "evaluation.num_images=4", "evaluation.metrics=[]",
        "run_dir=aligned", plugin=False, cwd=page,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert any("alignment_loss" in row for row in numbers(page / "aligned"))
