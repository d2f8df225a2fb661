"""Which steps of a run route, and at which rate: the fraction of tokens that bypass blocks.

Steps count from 0. Of S steps, the first round(warm_start S) and the last round(dense_tail S) are
not routed. In the others, first … last-1, a rate r is a number, or one of the following, where
p = (step - first) / (last - 1 - first):

    [linear, r0, r1]                r = r0 + (r1 - r0) p
    [cosine, r0, r1]                r = r0 + (r1 - r0) (1 - cos(pi p)) / 2
    [steps, r0, [f, r], …]          r0, then each r from step round(f S) on

The rate sets the number of tokens, and code is compiled for each number. So linear and cosine are
rounded to n + 1 levels from r0 to r1, n = ceil(16 |r1 - r0|); the first and last are exact.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field

from tread_zoo.fields import Fraction

STAIRS = 16  # levels of a rate per unit

Rate = Fraction | tuple[Any, ...]  # `check_rate` checks the tuple
Chance = Annotated[float, Field(gt=0, le=1)]


def stairs(rate: Any, routed: range, num_steps: int) -> tuple[tuple[int, float], ...]:
    """Return (first step, value) for each value that a rate takes over a run, in order of steps.

    Args:
        rate: a number or a list, such as [linear, 0.75, 0.25]; see the module's docstring.
        routed: the routed steps, first … last-1.
        num_steps: number of steps of the run.
    """
    if not isinstance(rate, list | tuple):
        return ((routed.start, float(rate)),)
    name, first, *rest = rate
    levels = {routed.start: float(first)}
    if name == "steps":
        for fraction, later in rest:
            levels[max(routed.start, round(fraction * num_steps))] = float(later)
        return tuple(sorted(levels.items()))
    change = rest[0] - first
    count = math.ceil(round(STAIRS * abs(change), 9))
    for level in range(1, count + 1):
        part = (level - 0.5) / count  # fraction of the change from which this level is nearest
        progress = part if name == "linear" else math.acos(1 - 2 * part) / math.pi
        step = routed.start + math.ceil(round(progress * (len(routed) - 1), 9))
        levels[step] = first + change * level / count
    return tuple(sorted(levels.items()))


def rate_at(rate: Any, step: int, routed: range, num_steps: int) -> float:
    """Return the value of `rate` at a routed step; for the arguments see `stairs`."""
    levels = stairs(rate, routed, num_steps)
    return next(value for begin, value in reversed(levels) if begin <= step)


def check_rate(field: str, rate: Any, warm_start: float, dense_tail: float) -> None:
    """Raise `ValueError` if `rate` is a list of a wrong form, has a value outside [0, 1), or has
    changes that do not ascend within the routed part of training. A number is not checked.

    Args:
        field: name of the option, for the error.
        rate: a number or a list; see the module's docstring.
        warm_start, dense_tail: fractions of training, at its start and end, that are not routed.
    """
    if not isinstance(rate, list | tuple):
        return
    fractions = _changes(rate)
    if fractions is None:
        raise ValueError(
            f"{field}={list(rate)} is no rate: give a number in [0, 1), [linear, 0.75, 0.25], "
            "[cosine, 0.75, 0.25], or [steps, 0.75, [0.3, 0.5], [0.6, 0.25]], a rate of 0.5 from "
            "30 % of training and of 0.25 from 60 %."
        )
    within = [warm_start, *fractions, 1.0 - dense_tail]
    if any(before >= after for before, after in pairwise(within)):
        raise ValueError(
            f"{field}={list(rate)} must ascend between {warm_start:g} and {1 - dense_tail:g} of "
            "training, its routed part."
        )


def _changes(rate: Sequence[Any]) -> list[float] | None:
    """Return the fractions of training at which a rate like [steps, r0, [f, r]] jumps, here [f];
    an empty list for [linear, r0, r1] and [cosine, r0, r1]; None for a list of another form or with
    a value outside [0, 1)."""
    name, *values = rate
    if name in ("linear", "cosine"):
        rates, fractions, fits = values, [], len(values) == 2
    else:
        pairs = [each for each in values[1:] if isinstance(each, list | tuple) and len(each) == 2]
        rates = [*values[:1], *(value for _, value in pairs)]
        fractions = [fraction for fraction, _ in pairs]
        fits = name == "steps" and len(pairs) == len(values) - 1 > 0
    are_rates = all(isinstance(r, int | float) and 0 <= r < 1 for r in rates)
    return fractions if fits and are_rates else None
