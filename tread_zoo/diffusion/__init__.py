"""Objectives, samplers and guidance: three parts that do not know each other's insides.

objective.py    what an objective is: `Objective`, `Draw`, `Network`
edm.py          EDM: noise level sigma, preconditioned denoiser
flow.py         flow matching: time t, velocity
samplers.py     Euler and Heun over a drift; the initial noise of an image
guidance.py     combining two drifts; classifier-free guidance
generate.py     from seeds and labels to images
"""

from dataclasses import fields
from typing import Any

from tread_zoo.diffusion.edm import EDM
from tread_zoo.diffusion.flow import FlowMatching
from tread_zoo.diffusion.generate import SamplingOptions, default_labels, generate
from tread_zoo.diffusion.guidance import classifier_free, combine
from tread_zoo.diffusion.objective import Draw, Network, Objective
from tread_zoo.diffusion.samplers import (
    SAMPLERS,
    Drift,
    Sampler,
    build_sampler,
    euler,
    heun,
    initial_noise,
    num_evaluations,
)
from tread_zoo.errors import unknown_name

__all__ = [
    "EDM",
    "OBJECTIVES",
    "SAMPLERS",
    "Draw",
    "Drift",
    "FlowMatching",
    "Network",
    "Objective",
    "Sampler",
    "SamplingOptions",
    "build_objective",
    "build_sampler",
    "classifier_free",
    "combine",
    "default_labels",
    "euler",
    "generate",
    "heun",
    "initial_noise",
    "num_evaluations",
]

OBJECTIVES: dict[str, type[EDM] | type[FlowMatching]] = {"edm": EDM, "flow": FlowMatching}


def build_objective(name: str, **options: Any) -> Objective:
    """Return the objective of that name, with its own keywords.

    Raises:
        ValueError: an unknown name or option (the nearest is suggested), or a wrong value.
    """
    if name not in OBJECTIVES:
        raise unknown_name("objective", name, OBJECTIVES)
    known = [field.name for field in fields(OBJECTIVES[name])]
    for option in options:
        if option not in known:
            raise unknown_name(f"{name} option", option, known)
    return OBJECTIVES[name](**options)
