"""The recurrence of linear attention and of delta rules in C for a CPU, which its operations share.

`recurrence.c` has the formula. Autograd keeps the inputs, u, and the states before every SPAN
steps. Sums and states are float32; inputs of another type are converted.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import segment_starts
from tread_zoo.kernels.compiled import CompiledSource
from tread_zoo.kernels.operators import empty_like

RECURRENCE_C = CompiledSource(Path(__file__).with_name("recurrence.c"))
SPAN = 32  # steps per chunk, so that its backward pass stays in the L2 cache

Inputs = tuple[Any, ...]  # q, k, v, a, b, beta, g; None where an operation has no such input


def make_empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised outputs of `forward`."""
    batch, length, heads, width = v.shape
    u = v.new_empty(v.shape, dtype=torch.float32)
    chunks = (length + SPAN - 1) // SPAN
    return empty_like(v), u, u.new_empty(chunks - 1, batch, heads, k.shape[3], width)


def forward(
    inputs: Inputs, segment_ids: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o and u [B, L, H, V], and the states between chunks [chunks - 1, B, H, K, V]."""
    _, u, states = make_empty(*inputs)
    o = torch.empty_like(u)
    _run(_convert(inputs), segment_ids, scale, u, states, o, *[None] * 8)
    return o.to(inputs[2].dtype), u, states


def backward(
    grad: Tensor,
    u: Tensor | None,
    states: Tensor,
    inputs: Inputs,
    segment_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """Return the gradient of each input that is not None."""
    given = _convert(inputs)
    grads = [None if x is None else torch.empty_like(x) for x in given]
    _run(given, segment_ids, scale, u, states, None, grad.float().contiguous(), *grads)
    return tuple(g.to(x.dtype) for g, x in zip(grads, inputs, strict=True) if g is not None)


def _convert(inputs: Inputs) -> Inputs:
    return tuple(None if x is None else x.float().contiguous() for x in inputs)


def _run(inputs: Inputs, segment_ids: Tensor | None, scale: float, *memory: Tensor | None) -> None:
    (batch, length, heads, size), width = inputs[1].shape, inputs[2].shape[3]
    keep = None if segment_ids is None else (~segment_starts(segment_ids)).float()
    sizes = batch, length, heads, size, width, SPAN, int(inputs[6].ndim == 4)
    scratch = RECURRENCE_C("recurrence_scratch", size, width, SPAN)
    RECURRENCE_C.share(
        "recurrence", *inputs, keep, *memory, scale, *sizes, jobs=batch * heads, scratch=scratch
    )
