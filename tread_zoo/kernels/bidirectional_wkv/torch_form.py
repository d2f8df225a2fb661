"""The bidirectional WKV in plain torch: one operator, two ways to compute it.

Both are two linear scans, over what lies before a token and over what lies after it. On the CPU
each block of rows takes the quicker way that its values allow: on one maximum a channel
(`one_maximum`) where keys, u and w stay within a bound, else on a running maximum
(`running_maximum`), which is exact for all values. Other devices take the latter, since to look at
values would wait for them. Only the inputs are kept for the backward pass; it computes all again.

Dimensions: B batch, L length, C channels, R rows of the batch done at a time.
"""

import math
from typing import Any

import torch
from torch import Tensor

import tread_zoo.kernels.bidirectional_wkv.one_maximum as one_maximum
import tread_zoo.kernels.bidirectional_wkv.running_maximum as running_maximum
from tread_zoo.kernels.bidirectional_wkv.inputs import Memory, prepare, state_dtype
from tread_zoo.kernels.chunks import row_blocks
from tread_zoo.kernels.operators import empty_like, make_operator

BLOCK_VALUES = 2**18  # B·L·C values done at a time on a CPU: the tensors of a block fit in cache


def bidirectional_wkv_torch(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return the WKV; see `tread_zoo.kernels.bidirectional_wkv`."""
    out: Tensor = _operator(k, v, w, u, positions, length)
    return out


def _forward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return out [B, L, C]."""
    out = empty_like(v)
    memory = Memory(k, state_dtype(k, v))
    with torch.autocast(k.device.type, enabled=False):
        for rows in row_blocks(k, BLOCK_VALUES):
            inputs = prepare(k, v, w, u, positions, length, rows)
            part = out[rows].transpose(0, 1)
            if (top := one_maximum.largest_key(inputs)) is not None:
                one_maximum.forward(inputs, top, memory, part)
            else:
                running_maximum.forward(inputs, memory, part)
    return out


def _backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    positions: Tensor | None,
    length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, w and u."""
    gk, gv = empty_like(k), empty_like(v)
    dtype = state_dtype(k, v)
    gs, gu = (torch.zeros(w.shape, dtype=dtype, device=w.device) for _ in range(2))
    memory = Memory(k, dtype)
    with torch.autocast(k.device.type, enabled=False):
        for rows in row_blocks(k, BLOCK_VALUES):
            inputs = prepare(k, v, w, u, positions, length, rows)
            parts = [x[rows].transpose(0, 1) for x in (grad, gk, gv)]
            parts[0] = parts[0].to(dtype)
            if (top := one_maximum.largest_key(inputs)) is not None:
                slope, bonus = one_maximum.backward(inputs, top, memory, *parts)
            else:
                slope, bonus = running_maximum.backward(inputs, memory, *parts)
            gs += slope
            gu += bonus
    return gk, gv, (gs / length).to(w.dtype), gu.to(u.dtype)


def _empty(k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return empty_like(v)


def forward_flops(k: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """54 B L C, those of the running maximum whichever way is taken: 21 a direction (m 2, a 4, b 3,
    h 5, c 3, c h 4) and 12 for r, f, N, D and N / D."""
    return 54 * math.prod(k)


def backward_flops(grad: tuple[int, ...], k: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """94 B L C: the 54 again, 15 a direction (c g 2, G 4, q and ∂s 5, in 4), 10 for g, ∂k, ∂u."""
    return 94 * math.prod(k)


_operator = make_operator(
    "bidirectional_wkv",
    _forward,
    _backward,
    empty=_empty,
    flops=(forward_flops, backward_flops),
    num_gradients=4,
)
