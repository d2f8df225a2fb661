"""Figures that stay what they are however the code is arranged: losses, held-out loss, scores.

`python -m tests.test_golden` measures them again and writes golden.json beside this file; a change
of a figure is a change of what the product does. Another CPU rounds otherwise, hence the tolerance.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.published_files import FASHION_MNIST
from tests.small_run import full_settings
from tread_zoo.evaluation import score
from tread_zoo.registry import register
from tread_zoo.training.loop import train
from tread_zoo.training.signals import Stopped

ROOT = Path(__file__).parents[1]
FIGURES = Path(__file__).with_name("golden.json")
RUNS = {
    "mamba": ["backbone=mamba"],
    "dit_edm_dense": ["backbone=dit", "routing=none", "objective=edm", "sampler=heun"],
}
SMALL = (
    "training.num_steps=50", "training.log_every=1", "training.precision=fp32",
    "optimizer.learning_rate=6e-3",
    "training.sample_every=0", "training.checkpoint_every=0", "sampler.num_steps=4",
    "evaluation.num_images=100", "device=cpu",
)  # fmt: skip
METRICS = ("fid", "kid", "precision", "recall")
FIRST = 5


@dataclass(frozen=True)
class FirstSteps:
    """The warm-up of the default schedule in 50 steps, which stops the run early."""

    def __call__(self, step, num_steps):
        if step == FIRST - 1:
            signal.raise_signal(signal.SIGTERM)
        return (step + 1) / 10


def numbers_of(folder, name):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def train_and_score(name, folder):
    """Train the first 50 steps on digits; return the losses, and the scores of 100 samples."""
    command = [sys.executable, "scripts/train.py", *RUNS[name], *SMALL, f"run_dir={folder}"]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    values = json.loads((folder / "score.json").read_text())["values"]
    return {
        "losses": numbers_of(folder, "loss"),
        "held_out_loss": numbers_of(folder, "held_out_loss")[0],
        "scores": {metric: values[metric] for metric in METRICS},
    }


def score_digits():
    """Return the scores of real digits against other real digits."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(np.round(load_digits().images * 255 / 16).astype(np.uint8))[:, None]
    return score(images[:700], images[700:1600], metrics=METRICS)["values"]


def score_clothes():
    """Return the scores of blurred clothes against real ones, at 8x8."""
    with np.load(FASHION_MNIST, allow_pickle=False) as file:
        images = torch.from_numpy(file["x_test"][:1000])[:, None].float()
    small = torch.nn.functional.interpolate(images, size=(8, 8), mode="area")
    blurred = torch.nn.functional.avg_pool2d(small, 3, stride=1, padding=1)
    one, other = (x.round().to(torch.uint8) for x in (blurred[:500], small[500:]))
    return score(one, other, metrics=METRICS)["values"]


def close(one, other, rtol):
    torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", RUNS)
def test_the_first_steps(own_registry, name, tmp_path):
    register("lr_schedule", "first_steps")(FirstSteps)
    settings = full_settings(*RUNS[name], *SMALL, "lr_schedule=first_steps")
    with pytest.raises(Stopped):
        train(**{**settings, "run_dir": str(tmp_path)})
    golden = json.loads(FIGURES.read_text())[name]["losses"]
    close(numbers_of(tmp_path, "loss"), golden[:FIRST], 1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_50_steps_and_their_scores(name, tmp_path):
    figures, golden = train_and_score(name, tmp_path / "run"), json.loads(FIGURES.read_text())[name]
    close(figures["losses"], golden["losses"], 5e-3)
    close(figures["held_out_loss"], golden["held_out_loss"], 5e-3)
    for metric in METRICS:
        close(figures["scores"][metric], golden["scores"][metric], 0.1)


def test_scores_of_real_digits():
    golden = json.loads(FIGURES.read_text())["real_digits"]
    for metric, value in score_digits().items():
        close(value, golden[metric], 1e-5)


@pytest.mark.skipif(not FASHION_MNIST.exists(), reason=f"{FASHION_MNIST} is absent")
def test_scores_of_real_clothes():
    golden = json.loads(FIGURES.read_text())["real_clothes"]
    for metric, value in score_clothes().items():
        close(value, golden[metric], 1e-5)


def main():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        figures = {name: train_and_score(name, Path(folder) / name) for name in RUNS}
    figures |= {"real_digits": score_digits(), "real_clothes": score_clothes()}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
