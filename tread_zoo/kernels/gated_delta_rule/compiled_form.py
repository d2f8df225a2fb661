"""The gated delta rule in C for a CPU, step by step; see `tread_zoo.kernels.recurrence`."""

from typing import Any

from torch import Tensor

import tread_zoo.kernels.recurrence as recurrence
from tread_zoo.kernels.chunks import power_of_two
from tread_zoo.kernels.gated_delta_rule.torch_form import CHUNK
from tread_zoo.kernels.operators import make_operator


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o, and u and states for the backward pass."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return recurrence.forward((q, k, v, None, None, beta, log_decay), segment_ids, scale)


def _backward(grad: Tensor, u: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, beta and log_decay."""
    q, k, v, beta, log_decay, segment_ids, scale = args
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = (q, k, v, None, None, beta, log_decay)
    return recurrence.backward(grad, u, states, inputs, segment_ids, scale)


def _flops(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], *args: Any
) -> tuple[int, int]:
    """Return the FLOPs of the torch form, which every form reports: products of pairs; of T with
    keys and values; of v' for o and for the state; with the state; and the inverses."""
    (batch, length, heads, size), width, by_channel = q, v[3], len(args[1]) == 4
    steps = max(2, power_of_two(length, CHUNK))
    chunks, square = -(-length // steps), steps * steps
    pairs = 2 * (square - steps) * size if by_channel else 4 * square * size
    read, state = 2 * square * size, 2 * steps * size * width
    within = pairs + read + 4 * square * width + state
    products, inverses = chunks * within + (chunks - 1) * 2 * state, chunks * steps * square
    unread = read if chunks == 1 else 0  # has no gradient
    rows = batch * heads
    return rows * (products + inverses), rows * (2 * (products - unread) + 3 * inverses)


gated_delta_rule_compiled = make_operator(
    "gated_delta_rule_compiled",
    _forward,
    _backward,
    empty=recurrence.make_empty,
    flops=_flops,
    num_gradients=5,
    num_kept=2,
)
