"""Checks of numbers that objectives, grids and samplers share."""

import math


def check_number(field: str, value: object, *, default: object, above: float = -math.inf) -> None:
    """Raise `ValueError` unless `value` is a finite number greater than `above`."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(
            f"{field}={value!r} must be a finite number{bound}; the default is {default}."
        )


def check_num_steps(num_steps: int) -> None:
    """Raise `ValueError` unless there is at least one step."""
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1.")
