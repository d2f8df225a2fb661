"""A run small enough for a test: digits, a two-layer-wide network, a handful of steps."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from tread_zoo.cli import as_keywords, register_configs

CONFIGS = Path(__file__).parents[2] / "configs"

SMALL = [
    "backbone.depth=4",
    "backbone.hidden_size=16",
    "training.batch_size=8",
    "training.num_steps=6",
    "training.warmup_steps=2",
    "training.log_every=2",
    "training.sample_every=0",
    "training.checkpoint_every=0",
    "training.precision=fp32",
    "sampler.num_steps=2",
    "evaluation.num_images=20",
    "evaluation.metrics=[]",
    "device=cpu",
]


def settings(*overrides, config="train"):
    """Return the keywords of `train` for the small run with overrides."""
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return as_keywords(compose(config, overrides=[*SMALL, *overrides]))


@pytest.fixture
def run(tmp_path):
    """Train in `tmp_path/<name>` with overrides; return the run's folder."""
    from tread_zoo.training import train

    def start(name, *overrides):
        return train(**settings(*overrides, f"run_dir={tmp_path / name}"))

    return start
