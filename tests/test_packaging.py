import subprocess
import sys
from pathlib import Path

import pytest

from tread_zoo import list_backbones

ROOT = Path(__file__).parents[1]

USE = """
import pathlib, sys, torch, backbones, tread_zoo
from tread_zoo import create_backbone, list_backbones
from tread_zoo.routing import build_routing
site = pathlib.Path(sys.argv[1])
for package in (backbones, tread_zoo):
    assert site in pathlib.Path(package.__file__).parents, package.__file__
architectures = list_backbones("*_tiny")
for name in architectures:
    b = create_backbone(name, input_size=8, in_channels=1, num_classes=10)
    routing = build_routing("tread", num_blocks=b.num_blocks, default_selector=b.default_selector)
    routes = routing.draw(2, b.grid, torch.Generator())
    b(torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2]), routes=routes).sum().backward()
from tread_zoo.evaluation.features import load_features
load_features()
print("ran", *architectures)
"""


@pytest.mark.slow
def test_the_wheel_works_outside_the_checkout(tmp_path):
    site = tmp_path / "site"
    for command in (
        ["pip", "wheel", "--no-deps", "-w", str(tmp_path), str(ROOT)],
        ["pip", "install", "--no-deps", "--target", str(site), *()],
    ):
        if command[1] == "install":
            command += [str(wheel) for wheel in tmp_path.glob("*.whl")]
        subprocess.run([sys.executable, "-m", *command], check=True, capture_output=True)
    done = subprocess.run(
        [sys.executable, "-c", USE, str(site)],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": ""}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ran", *list_backbones("*_tiny")]
    kit = [
        "pytest",
        "-q",
        "--pyargs",
        "tread_zoo.testing",
        "--backbone",
        "dit_tiny",
        "-k",
        "shapes",
    ]
    done = subprocess.run(
        [sys.executable, "-m", *kit],
        cwd=tmp_path, env={"PYTHONPATH": str(site), "PATH": ""}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
