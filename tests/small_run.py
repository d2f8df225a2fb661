"""A run small enough for a test: digits, a narrow network, a handful of steps."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from tread_zoo.cli import as_keywords, register_configs
from tread_zoo.training.parts import Parts, build_parts

CONFIGS = Path(__file__).parents[1] / "configs"
OUTSIDE_PARTS = {"tracker", "device", "run_dir", "resume", "overwrite", "kernels"}

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


def settings(*overrides):
    """Return the keywords of `train` for the small run with overrides."""
    return full_settings(*SMALL, *overrides)


def full_settings(*overrides):
    """Return the keywords of `train` for the default run with overrides."""
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return as_keywords(compose("train", overrides=list(overrides)))


def parts_of(given) -> Parts:
    """Build the parts of a run from the keywords of `train`."""
    return build_parts(**{key: v for key, v in given.items() if key not in OUTSIDE_PARTS})
