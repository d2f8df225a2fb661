"""The delta rule of RWKV-7 in C for a CPU, step by step; see `tread_zoo.kernels.recurrence`."""

from typing import Any

from torch import Tensor

import tread_zoo.kernels.recurrence as recurrence
from tread_zoo.kernels.dplr_delta_rule.torch_form import CHUNK
from tread_zoo.kernels.operators import make_operator


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, and u and states for the backward pass."""
    scale = 1.0 if scale is None else scale
    return recurrence.forward((q, k, v, a, b, None, log_decay), segment_ids, scale)


def _backward(grad: Tensor, u: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, a, b and log_decay."""
    q, k, v, a, b, log_decay, segment_ids, scale = args
    scale = 1.0 if scale is None else scale
    inputs = (q, k, v, a, b, None, log_decay)
    return recurrence.backward(grad, u, states, inputs, segment_ids, scale)


def _flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *args: Any
) -> tuple[int, int]:
    """Return the FLOPs of the torch form, which every form reports: products of pairs, of values
    and of states, the solutions for values and states, and the inverses."""
    (batch, length, heads, size), width = q, v[3]
    chunks = -(-length // CHUNK)
    steps = -(-length // chunks)
    square = steps * steps
    within, between = 8 * square * (size + width), 2 * square * size + 8 * steps * size * width
    products, inverses = chunks * within + (chunks - 1) * between, chunks * steps * square
    rows = batch * heads
    return rows * (products + inverses), rows * (2 * products + 3 * inverses)


dplr_delta_rule_compiled = make_operator(
    "dplr_delta_rule_compiled",
    _forward,
    _backward,
    empty=recurrence.make_empty,
    flops=_flops,
    num_gradients=6,
    num_kept=2,
)
