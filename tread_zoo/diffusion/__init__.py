"""Objectives, samplers and guidance: three parts that do not know each other's insides.

objective.py    what an objective is: `Objective`, `Draw`, `Network`
edm.py          EDM: noise level sigma, preconditioned denoiser
flow.py         flow matching: time t, velocity
grids.py        how the levels of sampling are spread
samplers.py     rules that integrate a drift, ODEs and SDEs; the noise of an image
guidance.py     combining a weak and a strong drift: the kinds of guidance
generate.py     from seeds and labels to images
"""

from dataclasses import fields
from typing import Any

from tread_zoo.diffusion.edm import EDM
from tread_zoo.diffusion.flow import FlowMatching
from tread_zoo.diffusion.generate import (
    SamplingOptions,
    build_sampling,
    default_labels,
    generate,
    named_guidance,
    sampler_fields,
)
from tread_zoo.diffusion.grids import TimeGrid
from tread_zoo.diffusion.guidance import (
    GUIDANCE,
    AutoGuidance,
    ClassifierFree,
    Guidance,
    ImageBatch,
    IntervalGuidance,
    NoGuidance,
    PathDropGuidance,
    SparseGuidance,
    build_guidance,
    combine,
    guidance_options,
)
from tread_zoo.diffusion.objective import Draw, Network, Objective
from tread_zoo.diffusion.samplers import (
    SAMPLERS,
    DPMSolver2M,
    Drift,
    EDMStochastic,
    Euler,
    FlowSDE,
    Heun,
    Problem,
    Sampler,
    build_sampler,
    initial_noise,
    num_evaluations,
    step_noise,
)
from tread_zoo.errors import unknown_name

__all__ = [
    "EDM",
    "GUIDANCE",
    "OBJECTIVES",
    "SAMPLERS",
    "AutoGuidance",
    "ClassifierFree",
    "DPMSolver2M",
    "Draw",
    "Drift",
    "EDMStochastic",
    "Euler",
    "FlowMatching",
    "FlowSDE",
    "Guidance",
    "Heun",
    "ImageBatch",
    "IntervalGuidance",
    "Network",
    "NoGuidance",
    "Objective",
    "PathDropGuidance",
    "Problem",
    "Sampler",
    "SamplingOptions",
    "SparseGuidance",
    "TimeGrid",
    "build_guidance",
    "build_objective",
    "build_sampler",
    "build_sampling",
    "combine",
    "default_labels",
    "generate",
    "guidance_options",
    "initial_noise",
    "named_guidance",
    "num_evaluations",
    "sampler_fields",
    "step_noise",
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
