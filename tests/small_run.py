"""A run small enough for a test: digits, a narrow network, a handful of steps."""

from contextlib import suppress
from unittest import mock

import numpy as np
import yaml
from PIL import Image

from tread_zoo.config import make_config
from tread_zoo.evaluation import held_out
from tread_zoo.registry import available, get_entry
from tread_zoo.training import log
from tread_zoo.training.loop import train
from tread_zoo.training.setup import Setup, build_setup

# Part by field, for overrides of its options alone.
PARTS = {
    "backbone": "dit_tiny", "routing": "tread", "objective": "flow", "data": "digits",
    "optimizer": "adamw", "lr_schedule": "cosine", "sampler": "euler", "guidance": "none",
    "tracker": "local", "alignment": "none",
}  # fmt: skip
SMALL = [
    "backbone.depth=4",
    "backbone.hidden_size=16",
    "training.batch_size=8",
    "training.num_steps=6",
    "training.log_every=2",
    "training.sample_every=0",
    "training.checkpoint_every=0",
    "training.precision=fp32",
    "sampler.num_steps=2",
    "evaluation.num_images=20",
    "evaluation.metrics=[label_accuracy]",
    "device=cpu",
]

# What the metadata of any checkpoint have beside its step.
META = {
    "plugins": [],
    "backbone": {
        "name": "dit_tiny", "config": {"input_size": 8, "in_channels": 1, "num_classes": 10},
    },
    "config": {
        "objective": {"name": "flow"}, "sampler": {"name": "euler"}, "guidance": {"name": "none"},
    },
}  # fmt: skip


def fields_of(*overrides):
    """Return the keywords of `train` that overrides such as `backbone.depth=4` give."""
    fields = {}
    for override in overrides:
        path, _, text = override.partition("=")
        value = yaml.safe_load(text)
        if isinstance(value, str) and text[:1].isdigit():
            with suppress(ValueError):
                value = float(text)  # 1e-3 is text to YAML
        group, _, key = path.partition(".")
        if group in PARTS and not key:
            fields[group] = {**fields.get(group, {}), **_named(value)}
        elif key:
            node = fields.setdefault(group, {"name": PARTS[group]} if group in PARTS else {})
            node[key] = value
        else:
            fields[group] = value
    return fields


def settings(*overrides):
    """Return the keywords of `train` for the small run with overrides."""
    return full_settings(*SMALL, *overrides)


def full_settings(*overrides):
    """Return the keywords of `train` for the default run with overrides."""
    return make_config(**fields_of(*overrides)).as_dict()


def ours(kind):
    """Return the names of a kind that the project registers, without names from other tests."""
    names = available(kind)
    return [n for n in names if get_entry(kind, n).target.__module__.startswith("tread_zoo")]


def parts_of(given) -> Setup:
    """Return the parts of a run from the keywords of `train`."""
    return build_setup(make_config(**given))


def train_small(folder, *overrides, **fields):
    """Train the small run with overrides in `folder`, and return it."""
    return train_quickly(**{**settings(*overrides), **fields, "run_dir": str(folder)})


def train_quickly(**fields):
    """Train without drawing a curve, and with few held-out images: either takes longer than a few
    steps."""
    few = mock.patch.object(held_out, "HELD_OUT_IMAGES", 16)
    with mock.patch.object(log, "plot_losses"), few:
        return train(**fields)


def save_photos(folder, count=40, shade=0):
    """Save coloured noise as pictures of two classes; return the overrides for it."""
    for index in range(count):
        (folder / str(index % 2)).mkdir(parents=True, exist_ok=True)
        picture = np.random.default_rng(index + shade).integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(picture).save(folder / str(index % 2) / f"{index:02}.png")
    return ["data=image_folder", f"data.path={folder}", "data.image_size=8"]


def _named(value):
    return value if isinstance(value, dict) else {"name": value}
