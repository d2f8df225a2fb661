"""Checks of numbers that objectives, grids and samplers share."""

import math

from tread_zoo.kinds import check_kind


def check_number(field: str, value: object, *, default: object, above: float = -math.inf) -> None:
    """Raise `ValueError` unless `value` is a finite number greater than `above`."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise ValueError(
            f"{field}={value!r} must be a finite number{bound}; the default is {default}."
        )


def check_num_steps(num_steps: int, field: str = "num_steps") -> None:
    """Raise `ValueError`, naming `field`, unless there is at least one step."""
    check_kind(field, num_steps, int)
    if num_steps < 1:
        raise ValueError(f"{field}={num_steps} must be at least 1.")
