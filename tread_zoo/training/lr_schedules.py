"""Learning-rate schedules: a factor f on every learning rate, by step.

    warm-up    f = (step + 1) / warmup_steps                        step < warmup_steps
    then, with p = (step - warmup_steps) / (num_steps - warmup_steps):
    constant   f = 1
    linear     f = 1 - p
    cosine     f = (1 + cos(pi p)) / 2
    wsd        f = 1, then linear to 0 over the last fraction `decay` of all steps (warm-up, stable,
               decay; MiniCPM, arXiv 2404.06395)

A schedule is called with (step, num_steps). Steps count from 0. warmup_steps=auto is 50, or a fifth
of the steps if there are fewer than 250.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import Field, NonNegativeInt

from tread_zoo.config import auto_warmup_steps
from tread_zoo.fields import Auto
from tread_zoo.registry import register


class LRSchedule(Protocol):
    """A function that returns the factor on the learning rates at `step` of `num_steps`."""

    def __call__(self, step: int, num_steps: int) -> float: ...


@register("lr_schedule", "constant")
@dataclass(frozen=True)
class Constant:
    """Warm-up, then constant at the peak.

    Args:
        warmup_steps: steps of the warm-up; auto is 50, or a fifth of the run if that is fewer.
    """

    warmup_steps: Auto | NonNegativeInt = "auto"

    def __call__(self, step: int, num_steps: int) -> float:
        auto = self.warmup_steps == "auto"
        warmup = auto_warmup_steps(num_steps) if auto else int(self.warmup_steps)
        if step < warmup:
            return (step + 1) / warmup
        return self.after((step - warmup) / max(1, num_steps - warmup))

    def after(self, progress: float) -> float:
        """Return the factor at the fraction `progress` of the steps after the warm-up."""
        return 1.0


@register("lr_schedule", "linear")
@dataclass(frozen=True)
class Linear(Constant):
    """Warm-up, then linear to 0."""

    def after(self, progress: float) -> float:
        return 1.0 - progress


@register("lr_schedule", "cosine")
@dataclass(frozen=True)
class Cosine(Constant):
    """Warm-up, then half a cosine to 0."""

    def after(self, progress: float) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * progress))


@register("lr_schedule", "wsd")
@dataclass(frozen=True)
class WarmupStableDecay(Constant):
    """Warm-up, then constant at the peak, then linear to 0 over the last fraction `decay`.

    Args:
        decay: fraction of all steps in which the rate falls.
    """

    decay: Annotated[float, Field(gt=0, le=1)] = 0.2

    def __call__(self, step: int, num_steps: int) -> float:
        left = (num_steps - step) / max(1.0, self.decay * num_steps)
        return super().__call__(step, num_steps) * min(1.0, left)
