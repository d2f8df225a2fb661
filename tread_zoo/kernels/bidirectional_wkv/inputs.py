"""What both plain-torch forms of the bidirectional WKV work on: some rows of the batch at a time.

Dimensions: B batch, L length, C channels, R rows of the batch done at a time.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Inputs(NamedTuple):
    """Some rows of the batch, time-major, in the state's dtype.

    k, v: [L, R, C]. s: w/T [C]. u: [C]. places: the positions [L, R, 1]; None where they are
    0 … L-1. length: T.
    """

    k: Tensor
    v: Tensor
    s: Tensor
    u: Tensor
    places: Tensor | None
    length: int


def prepare(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    positions: Tensor | None,
    length: int,
    rows: slice,
) -> Inputs:
    """Return the `rows` of the arguments that `bidirectional_wkv` takes."""
    dtype = state_dtype(k, v)
    keys, values = (x[rows].to(dtype).transpose(0, 1) for x in (k, v))
    places = None if positions is None else positions[rows].t().to(dtype).unsqueeze(-1)
    return Inputs(keys, values, w.to(dtype) / length, u.to(dtype), places, length)


def state_dtype(k: Tensor, v: Tensor) -> torch.dtype:
    """Return the dtype of the sums: float32, or float64 where an input has it."""
    return torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)


class Memory:
    """The tensors of a block of rows, lent again to the next: one allocation a call."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=like.device)

    def lend(self, *shape: int) -> Tensor:
        """Return an unset tensor of `shape`; what was lent before is given up."""
        size = math.prod(shape)
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size)
        return self._flat[:size].view(shape)


def exp_(x: Tensor) -> Tensor:
    """exp in place, as 2^(x / ln 2), the quicker of the two on a CPU. To divide the differences
    keeps large keys exact, which to divide the keys would not."""
    return x.mul_(LOG2_E).exp2_()
