"""Post-hoc EMA: averaged weights of any width, computed from the snapshots of a run.

An average's profile says how much the weights of each step count in it. Its width is the standard
deviation of the profile, divided by the number of steps so far. Averages of two widths are tracked
and stored. Any other is a linear combination of their snapshots, chosen by least squares between
profiles (EDM2, arXiv 2312.02696, appendix C). Here the coefficients must sum to 1, which removes
most of the error. `tread_zoo.training.ema` defines the profiles.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

TRACKED_WIDTHS = {"ema_0.05": 0.05, "ema_0.1": 0.1}  # width of each average, by file name
LARGEST_MISFIT = 0.1


def width_to_exponent(width: float) -> float:
    """Return the exponent p of the profile (see the module) of a relative `width`: the largest
    solution of width^2 = p / ((p + 1)^2 (p + 2)).

    Raises:
        ValueError: the width is not between 0 and 0.288; the mean over all steps has 0.288 (p = 1).
    """
    if not 0 < width < 12**-0.5:
        raise ValueError(
            f"weights=ema:{width:g}: a relative width lies between 0 and 0.288, the width of the "
            "mean of all steps; ema:0.05 to ema:0.2 are usual."
        )
    return float(np.roots([1, 4, 5 - width**-2, 2]).real.max())


def posthoc_coefficients(steps: Sequence[int], width: float) -> Any:
    """Return the coefficients, float64 [n, tracked widths], of the averages that were stored at n
    ascending `steps`. The sum of the averages times their coefficients is an average of `width` at
    the last step.

    Raises:
        ValueError: the combined profile differs from the wanted one by more than `LARGEST_MISFIT`
            (relative L2), or `width` is impossible.
    """
    times = np.repeat(np.array(steps) / steps[-1], len(TRACKED_WIDTHS))
    powers = np.tile(
        [width_to_exponent(tracked) for tracked in TRACKED_WIDTHS.values()], len(steps)
    )
    target = 1.0, width_to_exponent(width)
    gram = _inner(times[:, None], powers[:, None], times, powers)
    overlap, size = _inner(times, powers, *target), _inner(*target, *target)
    # The least-squares solution whose coefficients sum to 1, by a Lagrange multiplier.
    border = np.ones((len(times), 1))
    system = np.block([[gram, border], [border.T, np.zeros((1, 1))]])
    coefficients = np.linalg.lstsq(system, np.append(overlap, 1.0), rcond=None)[0][:-1]
    explained = coefficients @ (2 * overlap - gram @ coefficients) / size
    misfit = max(0.0, 1 - explained) ** 0.5
    if misfit > LARGEST_MISFIT:
        widths = " or ".join(f"{tracked:g}" for tracked in TRACKED_WIDTHS.values())
        raise ValueError(
            f"weights=ema:{width:g} needs more snapshots than the {len(steps)} up to step "
            f"{steps[-1]}: what they add up to misses its profile by {misfit:.0%}. Choose a width "
            f"nearer to {widths}, or train with a smaller training.ema_snapshots_every."
        )
    return coefficients.reshape(len(steps), len(TRACKED_WIDTHS))


def _inner(t_a: Any, p_a: Any, t_b: Any, p_b: Any) -> Any:
    """Return the integral over time of the product of two profiles, a and b, which end at the times
    t_a and t_b and have the exponents p_a and p_b; arrays are broadcast."""
    early, late = np.minimum(t_a, t_b), np.maximum(t_a, t_b)
    p_late = np.where(t_a <= t_b, p_b, p_a)
    return p_a * p_b / (p_a + p_b - 1) * (early / late) ** (p_late - 1) / late
