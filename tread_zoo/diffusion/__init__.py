"""Objectives, samplers and guidance, which do not know each other's internals.

objective.py    what an objective is: `Objective`, `Draw`, `Predict`
edm.py          EDM: noise level sigma, preconditioned denoiser
flow.py         flow matching: time t; velocity, x or noise
mean_flow.py    MeanFlow: the mean velocity between two times, for few steps
ddpm.py         DDPM: the noise at 1000 levels of sigma
grids.py        the noise levels at which sampling steps
samplers.py     rules that integrate dx/dt; the noise of an image
image_batch.py  the images and networks that guidance gets
guidance.py     weak + w (strong - weak): the kinds of guidance
sampling.py     from seeds and labels to images
"""

from tread_zoo.diffusion.ddpm import DDPM
from tread_zoo.diffusion.edm import EDM
from tread_zoo.diffusion.flow import FlowMatching
from tread_zoo.diffusion.grids import TimeGrid
from tread_zoo.diffusion.guidance import (
    AutoGuidance,
    ClassifierFree,
    CustomGuidance,
    Guidance,
    IntervalGuidance,
    NoGuidance,
    PathDropGuidance,
    SparseAutoGuidance,
    SparseClassifierFree,
    SparseGuidance,
    combine,
)
from tread_zoo.diffusion.image_batch import ImageBatch
from tread_zoo.diffusion.mean_flow import MeanFlow
from tread_zoo.diffusion.objective import Draw, Objective, Predict
from tread_zoo.diffusion.samplers import (
    DPMSolver2M,
    DxDt,
    EDMStochastic,
    Euler,
    FlowSDE,
    Heun,
    Mean,
    Problem,
    Sampler,
    initial_noise,
    step_noise,
)
from tread_zoo.diffusion.sampling import (
    SamplingOptions,
    build_sampling,
    check_weak,
    default_labels,
    generate,
)

__all__ = [
    "DDPM", "EDM", "AutoGuidance", "ClassifierFree", "CustomGuidance", "DPMSolver2M", "Draw",
    "DxDt", "EDMStochastic", "Euler", "FlowMatching", "FlowSDE", "Guidance", "Heun", "ImageBatch",
    "IntervalGuidance", "Mean", "MeanFlow", "NoGuidance", "Objective", "PathDropGuidance",
    "Predict", "Problem", "Sampler", "SamplingOptions", "SparseAutoGuidance",
    "SparseClassifierFree", "SparseGuidance", "TimeGrid", "build_sampling", "check_weak", "combine",
    "default_labels", "generate", "initial_noise", "step_noise",
]  # fmt: skip
