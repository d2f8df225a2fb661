"""Schedules: how the rate of a route changes over a training run.

Steps count from 0. Of S steps the first round(warm_start S) and the last round(dense_tail S) are
dense. On the others, first … last-1, the rate goes from r0 (`selection_rate`) to r1 (`final_rate`):

    p = (step - first) / (last - 1 - first)
    linear: r = r0 + (r1 - r0) p
    cosine: r = r0 + (r1 - r0) (1 - cos(pi p)) / 2
    steps:  r0, then each [fraction of training, rate] of a list from step round(fraction S) on

The rate sets the number of tokens, and code is compiled for each number. So linear and cosine move
in n = ceil(16 |r1 - r0|) equal stairs, to the nearest of n + 1 levels; first and last are exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

STAIRS = 16  # levels of a rate per unit


@dataclass(frozen=True)
class RateSchedule:
    """The rate of one route over training.

    Args:
        name: linear, cosine or steps.
        selection_rate: the first rate.
        final_rate: the last rate, for linear and cosine.
        rate_steps: (fraction of training, rate) in ascending order, for steps.
    """

    name: str
    selection_rate: float
    final_rate: float = 0.0
    rate_steps: tuple[tuple[float, float], ...] = ()

    def stairs(self, routed: range, num_steps: int) -> tuple[tuple[int, float], ...]:
        """Return (first step, rate) of each level, ascending in the step.

        Args:
            routed: the steps that are routed, first … last-1.
            num_steps: steps of the whole run.
        """
        levels = {routed.start: self.selection_rate}
        for fraction, rate in self.rate_steps:
            levels[max(routed.start, round(fraction * num_steps))] = rate
        if self.name != "steps":
            change = self.final_rate - self.selection_rate
            count = math.ceil(round(STAIRS * abs(change), 9))
            for level in range(1, count + 1):
                part = (level - 0.5) / count  # of the change, where this level becomes the nearest
                progress = part if self.name == "linear" else math.acos(1 - 2 * part) / math.pi
                step = routed.start + math.ceil(round(progress * (len(routed) - 1), 9))
                levels[step] = self.selection_rate + change * level / count
        return tuple(sorted(levels.items()))

    def describe(self) -> str:
        """Return the rates for a log line."""
        if self.name == "steps":
            later = [f"from {fraction:.0%} {rate:g}" for fraction, rate in self.rate_steps]
            return ", ".join([f"rate {self.selection_rate:g}", *later])
        return f"rate {self.selection_rate:g} to {self.final_rate:g}, {self.name}"


def build_schedule(
    label: str, fields: Mapping[str, Any], *, warm_start: float, dense_tail: float
) -> RateSchedule | None:
    """Return the schedule of one route; None for a constant rate.

    Args:
        label: the route's name in errors.
        fields: `schedule`, `selection_rate`, `final_rate`, `rate_steps`.
        warm_start, dense_tail: fractions of training.

    Raises:
        ValueError: a field is missing or unused, or steps are out of order or outside the routed
            part of training.
    """
    name, final = fields["schedule"], fields["final_rate"]
    steps = tuple((float(fraction), float(rate)) for fraction, rate in fields["rate_steps"])
    if (final is not None) != (name in ("linear", "cosine")):
        raise ValueError(
            f"{label}.final_rate={final} and {label}.schedule={name} do not go together: linear "
            "and cosine need a final_rate, other schedules have none."
        )
    if bool(steps) != (name == "steps"):
        raise ValueError(
            f"{label}.rate_steps={list(steps)} and {label}.schedule={name} do not go together: "
            "schedule=steps needs some, as [[0.3, 0.5], [0.6, 0.25]], other schedules have none."
        )
    fractions = [warm_start, *(fraction for fraction, _ in steps), 1.0 - dense_tail]
    if any(before >= after for before, after in pairwise(fractions)):
        raise ValueError(
            f"{label}.rate_steps={list(steps)} must ascend between {warm_start:g} and "
            f"{1 - dense_tail:g} of training, its routed part."
        )
    if name == "constant":
        return None
    return RateSchedule(name, float(fields["selection_rate"]), float(final or 0.0), steps)
