"""What the torch forms share.

Dimensions: Q steps of a chunk.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def unit_lower_inverse(a: Tensor) -> Tensor:
    """Return (I - a)^-1 [..., Q, Q] for a strictly lower triangular [..., Q, Q].

    What `a` has on and above its diagonal is not looked at, and gets no gradient.

    By substitution: the product Π (I + a^(2^j)) is equal to it in exact numbers only. For keys that
    are alike the powers of a grow like binomials and cancel, which leaves float32 errors above 1.
    """
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    inverse: Tensor = torch.linalg.solve_triangular(-a, eye, upper=False, unitriangular=True)
    return inverse


def row_blocks(x: Tensor, num_values: int) -> list[slice]:
    """Return the rows of the batch that are done at a time: on a CPU, of about `num_values`."""
    num_rows = len(x)
    if x.device.type == "cpu":
        num_blocks = -(-x.numel() // num_values)
        num_rows = -(-len(x) // min(len(x), num_blocks))
    return [slice(row, min(row + num_rows, len(x))) for row in range(0, len(x), num_rows)]


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which sums stay in float32; the meta device has no autocast."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@register_flop_formula(torch.ops.aten.linalg_solve_triangular)
def _solve_flops(
    a: tuple[int, ...], b: tuple[int, ...], *args: Any, left: bool = True, **kwargs: Any
) -> int:
    """A sum over half of the steps, on the average, for each entry of the solution."""
    return math.prod(b) * a[-1]
