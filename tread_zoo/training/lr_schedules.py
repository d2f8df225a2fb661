"""Learning-rate schedules: the factor on every learning rate at a step.

    warm-up    f = (step + 1) / warmup_steps                        step < warmup_steps
    then, with p = (step - warmup_steps) / (num_steps - warmup_steps):
    constant   f = 1
    linear     f = 1 - p
    cosine     f = (1 + cos(pi p)) / 2
    wsd        f = 1, and over the last `decay` of all steps linearly to 0 (warm-up, stable, decay;
               MiniCPM, arXiv 2404.06395)

A schedule is called with (step, num_steps), steps counted from 0.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field, NonNegativeInt

from tread_zoo.registry import register


class LRSchedule(Protocol):
    """Return the factor on the learning rates at `step` of `num_steps`."""

    def __call__(self, step: int, num_steps: int) -> float: ...


def warm_up(step: int, num_steps: int, warmup_steps: int) -> tuple[float, float]:
    """Return the factor of the warm-up, 1 after it, and the progress after it, 0 … 1."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps, 0.0
    return 1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps)


@register("lr_schedule", "constant")
@dataclass(frozen=True)
class Constant:
    """Warm-up, then the peak."""

    warmup_steps: NonNegativeInt = 50

    def __call__(self, step: int, num_steps: int) -> float:
        return warm_up(step, num_steps, self.warmup_steps)[0]


@register("lr_schedule", "linear")
@dataclass(frozen=True)
class Linear:
    """Warm-up, then straight to 0."""

    warmup_steps: NonNegativeInt = 50

    def __call__(self, step: int, num_steps: int) -> float:
        factor, progress = warm_up(step, num_steps, self.warmup_steps)
        return factor * (1.0 - progress)


@register("lr_schedule", "cosine")
@dataclass(frozen=True)
class Cosine:
    """Warm-up, then half a cosine to 0."""

    warmup_steps: NonNegativeInt = 50

    def __call__(self, step: int, num_steps: int) -> float:
        factor, progress = warm_up(step, num_steps, self.warmup_steps)
        return factor * 0.5 * (1.0 + math.cos(math.pi * progress))


@register("lr_schedule", "wsd")
@dataclass(frozen=True)
class WarmupStableDecay:
    """Warm-up, then the peak, then straight to 0 over the last `decay` of all steps."""

    warmup_steps: NonNegativeInt = 50
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2

    def __call__(self, step: int, num_steps: int) -> float:
        factor, _ = warm_up(step, num_steps, self.warmup_steps)
        return factor * min(1.0, (num_steps - step) / max(1.0, self.decay * num_steps))
