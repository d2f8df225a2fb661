"""The example package: a backbone from outside, in every place where ours are."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_run import SMALL
from tread_zoo import register_backbone
from tread_zoo.testing import CHECKS, Probe

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "plugin"
GUIDE = ROOT / "docs" / "adding_a_backbone.md"
MIXER_LINES, BACKBONE_LINES = 25, 3


def test_a_backbone_is_a_short_mixer_and_three_lines_and_opens_the_guide():
    code = (EXAMPLE / "tread_zoo_mixer.py").read_text().split('"""', 2)[2].strip()
    assert code in GUIDE.read_text()
    _, mixer, backbone = re.split(r"\n\n\n", code)
    assert len([line for line in mixer.splitlines() if line.strip()]) <= MIXER_LINES
    assert len(backbone.splitlines()) == BACKBONE_LINES


def guides(first_line):
    """Return the names that the guide's code with this beginning defines."""
    (code,) = re.findall(rf"```python\n({first_line}.*?)```", GUIDE.read_text(), re.S)
    names = {"__name__": "guide"}
    exec("import torch\nfrom torch import nn\n" + code, names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixer_tiny", "Mean", "Averages"])
def test_what_the_guide_writes_keeps_the_contract(own_registry, name):
    if name == "mixer_tiny":
        runpy.run_path(str(EXAMPLE / "tread_zoo_mixer.py"))
    else:
        first = {
            "Mean": "from backbones.mixers.scan",
            "Averages": "from tread_zoo.contract.backbone",
        }[name]
        register_backbone(name)(guides(first)[name])
    for label in CHECKS.keys() - {"compiles"}:
        CHECKS[label](Probe(name, overrides={"hidden_size": 16, "depth": 4}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "backbone", ["dit_tiny", pytest.param("mamba_tiny", marks=pytest.mark.nightly)]
)
def test_the_quickstart_is_short_and_runs(backbone, tmp_path, monkeypatch, capsys):
    code = (ROOT / "examples" / "quickstart.py").read_text().split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) < 40
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quickstart.py", backbone, "20"])
    runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert float(capsys.readouterr().out.split()[3]) < 1.5, "it learns: the first loss is about 2"
    assert (tmp_path / "quickstart.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install the example into a folder of its own; return an environment that finds it."""
    site = tmp_path_factory.mktemp("site")
    command = ["pip", "install", "--no-deps", "--target", str(site), str(EXAMPLE)]
    subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


def call(*command, cwd, env):
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.mark.nightly
def test_it_is_listed_trained_and_sampled(installed, tmp_path):
    listing = "from tread_zoo import list_backbones; print(*list_backbones())"
    assert "mixer_tiny" in call("-c", listing, cwd=tmp_path, env=installed).split()
    run = "runs/mixed"
    small = [*SMALL, "backbone=mixer_tiny", f"run_dir={run}"]
    said = call(ROOT / "scripts/train.py", *small, cwd=tmp_path, env=installed)
    assert "selector blocks" in said, "its own selector is the default"
    of = [f"checkpoint={run}", "num_images=4"]
    call(ROOT / "scripts/sample.py", *of, "device=cpu", cwd=tmp_path, env=installed)
    assert list((tmp_path / run).glob("generated/*_grid.png"))
