"""A run small enough for a test: digits, a narrow network, a handful of steps."""

import functools
import json
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from unittest import mock

from hydra import compose, initialize_config_dir

from tread_zoo.cli import as_keywords, register_configs
from tread_zoo.evaluation import flops
from tread_zoo.kernels import get_forms
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
    return deepcopy(_compose(overrides))


@functools.cache
def _compose(overrides):
    register_configs()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return as_keywords(compose("train", overrides=list(overrides)))


def parts_of(given) -> Parts:
    """Build the parts of a run from the keywords of `train`."""
    return build_parts(**{key: v for key, v in given.items() if key not in OUTSIDE_PARTS})


def train_small(folder, *overrides):
    """Train the small run with overrides in `folder`, and return it.

    What a kind of call costs is counted once for all of them: it is most of so short a run.
    """
    from tread_zoo.training import train

    with counting_once():
        return train(**{**settings(*overrides), "run_dir": str(folder)})


@contextmanager
def counting_once():
    """Count the FLOPs of each kind of call of each network once, whoever asks within."""
    with mock.patch.object(flops, "_trace", _trace_once):
        yield


_trace, _traced = flops._trace, {}


def _trace_once(meta, batch, routes, backward):
    network = json.dumps([meta.name, meta.config, meta.fused_ranges, meta.checkpoint_blocks])
    kinds = [(type(r), r.start, r.end, getattr(r, "num_kept", None)) for r in routes]
    key = (network, batch, tuple(kinds), backward, tuple(get_forms().items()))
    if key not in _traced:
        _traced[key] = _trace(meta, batch, routes, backward)
    return _traced[key]
