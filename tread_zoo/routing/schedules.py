"""Schedules: how the rate of a route changes over a training run.

Steps are counted from 0. Of S steps the first round(warm_start S) and the last round(dense_tail S)
are dense; on the others, first … last-1, the rate goes from r0 (`selection_rate`) to r1
(`final_rate`):

    p = (step - first) / (last - 1 - first)
    linear: r = r0 + (r1 - r0) p
    cosine: r = r0 + (r1 - r0) (1 - cos(pi p)) / 2

A rate sets the number of tokens, and compiled code is made anew for every number, so these rates
move by stairs: n = ceil(16 |r1 - r0|) equal steps of 1/16 at most, r the nearest of the n + 1
levels. The run starts at r0 and ends at r1 exactly.

    steps:  r0, then each [fraction of training, rate] of a list from step round(fraction S) on
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tread_zoo.errors import unknown_name

SCHEDULES = ("constant", "linear", "cosine", "steps")
STAIRS = 16  # levels of a rate per unit


@dataclass(frozen=True)
class RateSchedule:
    """The rate of one route over training.

    Args:
        name: one of `SCHEDULES`.
        selection_rate: the first rate.
        final_rate: the last one, for linear and cosine.
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
        found = {routed.start: self.selection_rate}
        if self.name == "steps":
            for fraction, rate in self.rate_steps:
                found[max(routed.start, round(fraction * num_steps))] = rate
        elif self.name != "constant":
            change = self.final_rate - self.selection_rate
            count = math.ceil(round(STAIRS * abs(change), 9))
            for level in range(1, count + 1):
                share = (level - 0.5) / count  # where this level becomes the nearest
                progress = share if self.name == "linear" else math.acos(1 - 2 * share) / math.pi
                step = routed.start + math.ceil(round(progress * (len(routed) - 1), 9))
                found[step] = self.selection_rate + change * level / count
        return tuple(sorted(found.items()))

    def describe(self) -> str:
        """Return the rates in words; "" for a constant one."""
        if self.name == "constant":
            return ""
        if self.name == "steps":
            later = [f"from {fraction:.0%} {rate:g}" for fraction, rate in self.rate_steps]
            return ", ".join([f"rate {self.selection_rate:g}", *later])
        return f"rate {self.selection_rate:g} to {self.final_rate:g}, {self.name}"


def build_schedule(
    label: str, fields: Mapping[str, Any], *, warm_start: float, dense_tail: float
) -> RateSchedule:
    """Build the schedule of one route from its checked `selection_rate` and its other fields.

    Args:
        label: the route's name in error texts.
        fields: `schedule`, `selection_rate`, `final_rate`, `rate_steps`.
        warm_start, dense_tail: fractions of training, checked.

    Raises:
        ValueError: an unknown schedule, a rate outside [0, 1), a field that the schedule lacks or
            would not read, or steps that are out of order or outside the routed part of training.
    """
    name, final, steps = fields["schedule"], fields["final_rate"], fields["rate_steps"]
    if name not in SCHEDULES:
        raise unknown_name(f"{label}.schedule", name, SCHEDULES)
    if final is not None and name not in ("linear", "cosine"):
        raise ValueError(
            f"{label}.final_rate={final} is not read by schedule={name}; use schedule=linear or "
            "cosine, or leave it null."
        )
    if steps and name != "steps":
        raise ValueError(
            f"{label}.rate_steps is not read by schedule={name}; use schedule=steps, or leave it "
            "empty."
        )
    first = float(fields["selection_rate"])
    if name in ("linear", "cosine"):
        check_fraction(f"{label}.final_rate", final, "the rate at the end of the schedule")
        return RateSchedule(name, first, final_rate=float(final))
    if name == "steps":
        pairs = _check_steps(label, steps, warm_start, 1.0 - dense_tail)
        return RateSchedule(name, first, rate_steps=pairs)
    return RateSchedule(name, first)


def check_fraction(field: str, value: Any, meaning: str) -> None:
    """Raise `ValueError` unless `value` is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(f"{field}={value} must be a number in [0, 1): {meaning}.")


def _check_steps(
    label: str, steps: Any, low: float, high: float
) -> tuple[tuple[float, float], ...]:
    """Return the list of [fraction, rate] as pairs."""
    example = "write [[0.3, 0.5], [0.6, 0.25]]: rate 0.5 from 30 % of training, 0.25 from 60 %"
    if not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
        raise ValueError(f"{label}.rate_steps={steps} is no list for schedule=steps; {example}.")
    pairs: list[tuple[float, float]] = []
    for index, pair in enumerate(steps):
        field, before = f"{label}.rate_steps[{index}]", pairs[-1][0] if pairs else low
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            raise ValueError(f"{field}={pair} must be [fraction of training, rate]; {example}.")
        check_fraction(f"{field}[0]", pair[0], "a fraction of training")
        check_fraction(f"{field}[1]", pair[1], "a rate")
        if not before < pair[0] < high:
            raise ValueError(
                f"{field} begins at {pair[0]} of training, which must lie after {before:g} (the "
                f"{'entry' if pairs else 'start of routing'} before it) and before {high:g} (the "
                f"end of routing)."
            )
        pairs.append((float(pair[0]), float(pair[1])))
    return tuple(pairs)
