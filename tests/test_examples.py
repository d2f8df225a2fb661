"""The example package: a backbone from outside, in every place where ours are."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_run import SMALL

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tread_zoo_mixer"
CODE_LIMIT = 80


def test_the_guide_fits_its_promise_and_quotes_the_code():
    code = (EXAMPLE / "tread_zoo_mixer.py").read_text()
    body = code.split('"""', 2)[2]  # without the module's docstring
    lines = [line for line in body.splitlines() if line.strip()]
    assert len(lines) <= CODE_LIMIT
    guide = (ROOT / "docs" / "adding_a_backbone.md").read_text()
    for quoted in (
        '@register_backbone("mixer_tiny", patch_size=2, hidden_size=96, depth=8)',
        "self.mix[ids.unsqueeze(2), ids.unsqueeze(1)]",
        "return (self.blocks[index](streams[0], condition, ids),)",
        "return unpatchify(self.final(streams[0], condition), self.patch_size, self.grid)",
    ):
        assert quoted in code
        assert quoted in guide


@pytest.mark.parametrize("backbone", ["dit_tiny", "mamba_tiny"])
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


@pytest.mark.slow
def test_it_is_listed_trained_and_sampled(installed, tmp_path):
    listing = "from tread_zoo import list_backbones; print(*list_backbones())"
    assert "mixer_tiny" in call("-c", listing, cwd=tmp_path, env=installed).split()
    small = [*SMALL, "backbone=mixer_tiny"]
    said = call(ROOT / "scripts/train.py", *small, cwd=tmp_path, env=installed)
    assert "(blocks)" in said, "its own selector is the default"
    run = "checkpoint=runs/digits_mixer_tiny_tread_flow_seed0"
    call(ROOT / "scripts/sample.py", run, "num_images=4", "device=cpu", cwd=tmp_path, env=installed)
    assert list((tmp_path / run.partition("=")[2]).glob("generated/*_grid.png"))


@pytest.mark.slow
def test_it_keeps_the_contract(installed, tmp_path):
    kit = ["-m", "pytest", "--pyargs", "tread_zoo.testing", "-q", "-p", "no:cacheprovider"]
    said = call(*kit, "--backbone", "mixer_tiny", cwd=tmp_path, env=installed)
    assert "passed" in said
    assert "failed" not in said
