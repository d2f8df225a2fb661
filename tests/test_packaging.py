"""What a wheel brings, run outside the clone: the packages, the kit, and the command."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.small_run import SMALL
from tread_zoo import __version__, list_backbones
from tread_zoo.runs.checkpoint import find_checkpoint

ROOT = Path(__file__).parents[1]
RUN = "runs/digits_dit_tiny_tread_flow_seed0"

USE = """
import pathlib, sys, torch, backbones, tread_zoo
from tread_zoo import create, create_backbone, list_backbones, load_pretrained
from tread_zoo.routing import Stack, Step
from tread_zoo.seeding import make_image_generator
site = pathlib.Path(sys.argv[1])
for package in (backbones, tread_zoo):
    assert site in pathlib.Path(package.__file__).parents, package.__file__
    assert pathlib.Path(package.__file__).with_name("py.typed").exists()
architectures = list_backbones("*_tiny")
for name in architectures:
    b = create_backbone(name, input_size=8, in_channels=1, num_classes=10)
    images = make_image_generator("route", images=range(2))
    routes = create("routing", "tread").draw(Stack.of(b), images, Step(0, 1, 0))
    b(torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2]), routes=routes).sum().backward()
from tread_zoo.evaluation.features import load_features
load_features()
load_pretrained("dit")
print("ran", *architectures)
"""
COMPLETE = """
eval "$(tread-zoo --shell-completion)"
complete_line() { COMP_LINE="$*"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tread_zoo; }
complete_line tread-zoo tr; echo "${COMPREPLY[@]}"
complete_line tread-zoo train backbone=mamba2_t; echo "${COMPREPLY[@]}"
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install a wheel of the project into a folder of its own; the environment has the rest."""
    folder = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    assert built.stat().st_size < 12e6
    install = [*pip, "install", "--no-deps", "--target", str(folder / "site"), str(built)]
    subprocess.run(install, check=True, capture_output=True)
    return folder / "site"


@pytest.fixture
def call(site, tmp_path):
    """Return a function that runs a program in an empty folder and returns what it printed."""
    path = os.pathsep.join([str(site / "bin"), os.defpath])
    env = {"PYTHONPATH": str(site), "PATH": path, "OMP_NUM_THREADS": "1"}

    def call(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


def test_the_wheel_works_outside_the_checkout(site, call):
    said = call(sys.executable, "-c", USE, str(site))
    assert said.split() == ["ran", *list_backbones("*_tiny")]
    kit = ["--pyargs", "tread_zoo.testing", "--backbone", "dit_tiny", "-k", "shapes"]
    call(sys.executable, "-m", "pytest", "-q", *kit)


def test_the_command_trains_samples_and_compares(site, call, tmp_path):
    program = str(site / "bin" / "tread-zoo")
    assert str(site / "tread_zoo" / "configs") in call(program)
    assert "tread-zoo train backbone=mamba" in call(program, "train", "--help")
    given = [*SMALL, f"run_dir={RUN}"]
    call(program, "train", *given)
    (start,) = (tmp_path / RUN / "commands.jsonl").read_text().splitlines()
    assert json.loads(start)["code"] == __version__
    assert shlex.split(json.loads(start)["command"])[1:] == [program, "train", *given]
    call(program, "sample", f"checkpoint={RUN}", "num_images=4", "device=cpu", "out=images")
    assert (tmp_path / "images" / "000003.png").exists()
    swept = ["backbone=dit_tiny", "routing=none", "seed=0", *SMALL, "compare.out=out"]
    call(sys.executable, "-m", "tread_zoo", "compare", *swept)
    assert list(pd.read_csv(tmp_path / "out" / "results.csv").steps) == [6]
    assert "<pre>tread-zoo compare" in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.nightly
def test_a_launcher_s_job_trains(call, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    sweep = ["-m", "hydra/launcher=submitit_local", "hydra.sweep.dir=sweep"]
    call("tread-zoo", "train", *sweep, *SMALL, f"run_dir={tmp_path / 'run'}")
    assert find_checkpoint(tmp_path / "run").step == 6


def test_the_shell_completes_commands_and_their_options(call):
    assert call("bash", "-c", COMPLETE).splitlines() == ["train", "backbone=mamba2_tiny"]
