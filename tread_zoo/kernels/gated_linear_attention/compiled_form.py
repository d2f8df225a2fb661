"""Gated linear attention in C for a CPU, step by step; see `tread_zoo.kernels.recurrence`."""

from typing import Any

from torch import Tensor

import tread_zoo.kernels.recurrence as recurrence
from tread_zoo.kernels.gated_linear_attention.torch_form import flops
from tread_zoo.kernels.operators import make_operator


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Return o, and the states for the backward pass; there is no u."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = (q, k, v, None, None, None, log_decay)
    o, _, states = recurrence.forward(inputs, segment_ids, scale)
    return o, states


def _backward(grad: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v and log_decay."""
    q, k, v, log_decay, segment_ids, scale = args
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = (q, k, v, None, None, None, log_decay)
    return recurrence.backward(grad, None, states, inputs, segment_ids, scale)


def _empty(*args: Any) -> tuple[Tensor, Tensor]:
    o, _, states = recurrence.make_empty(*args)
    return o, states


gated_linear_attention_compiled = make_operator(
    "gated_linear_attention_compiled",
    _forward,
    _backward,
    empty=_empty,
    flops=flops,
    num_gradients=4,
    num_kept=1,
)
