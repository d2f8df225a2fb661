"""The recurrence of linear attention and of delta rules in C for a CPU: one operator for them all.

The formula is in `recurrence.c`, with u_t = S_{t-1}ᵀ a_t. Autograd keeps the inputs, u, and the
state S before each chunk of SPAN steps but the first. Sums and states are float32; inputs of
another type are converted.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import CHUNK, power_of_two, segment_starts
from tread_zoo.kernels.compiled import CompiledSource
from tread_zoo.kernels.operators import empty_like, make_operator

RECURRENCE_C = CompiledSource(Path(__file__).with_name("recurrence.c"))
SPAN = 32  # steps per chunk, so that its backward pass stays in the L2 cache

Sizes = tuple[int, ...]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    beta: Tensor | None,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B, L, H, V], u_t = S_{t-1}ᵀ a_t of the same shape, and the states S between chunks,
    [chunks - 1, B, H, K, V]. u is empty for linear attention, which has neither a nor beta."""
    inputs = (q, k, v, a, b, beta, log_decay)
    _, u, states = _empty(*inputs)
    o = v.new_empty(v.shape, dtype=torch.float32)
    _run(_convert(inputs), segment_ids, scale, u, states, o, *[None] * 8)
    return o.to(v.dtype), u, states


def _backward(grad: Tensor, u: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs before `segment_ids`, empty for an input of None."""
    *inputs, segment_ids, scale = args
    given = _convert(inputs)
    grads = [None if x is None else torch.empty_like(x) for x in given]
    _run(given, segment_ids, scale, u, states, None, grad.float().contiguous(), *grads)
    pairs = zip(grads, inputs, strict=True)
    return tuple(grad.new_empty(0) if g is None else g.to(x.dtype) for g, x in pairs)


def _empty(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor | None, b: Any, beta: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised outputs of `_forward`."""
    batch, length, heads, width = v.shape
    u = v.new_empty(0 if a is None and beta is None else v.shape, dtype=torch.float32)
    between = (length - 1) // SPAN
    return empty_like(v), u, u.new_empty(between, batch, heads, k.shape[3], width)


def _convert(inputs: Any) -> list[Tensor | None]:
    return [None if x is None else x.float().contiguous() for x in inputs]


def _run(inputs: Any, segment_ids: Tensor | None, scale: float, *memory: Tensor | None) -> None:
    (batch, length, heads, size), width = inputs[1].shape, inputs[2].shape[3]
    keep = None if segment_ids is None else (~segment_starts(segment_ids)).float()
    sizes = batch, length, heads, size, width, SPAN, int(inputs[6].ndim == 4)
    RECURRENCE_C.share("recurrence", *inputs, keep, *memory, scale, *sizes, jobs=batch * heads)


def linear_attention_flops(q: Sizes, k: Sizes, v: Sizes, *args: Any) -> tuple[int, int]:
    """Return the FLOPs of linear attention's torch form, forward and backward, for shapes q, k, v.

    Forward counts the products for W, W v, the states, and what the steps read from the states, in
    the symbols of the torch form. Backward takes twice as many FLOPs.
    """
    (batch, length, heads, width), size = q, v[3]
    steps = power_of_two(length, CHUNK)
    rows, num_chunks = batch * heads, -(-length // steps)
    weights = num_chunks * steps * (steps - 1) * width + 2 * num_chunks * steps * steps * size
    forward = rows * (weights + 4 * (num_chunks - 1) * steps * width * size)
    return forward, 2 * forward


def _delta_rule_flops(q: Sizes, v: Sizes, by_channel: bool) -> tuple[int, int]:
    """Return the FLOPs of the gated delta rule's torch form, forward and backward, for shapes q, v.

    Counted, in the symbols of the torch form: products of pairs of steps; M (β v) and M (β exp(s)
    k); the sums of v' for o and for S'; the products of S for v' and for o; and the inverses M.
    `by_channel`: whether each channel has its own decay.
    """
    (batch, length, heads, size), width = q, v[3]
    steps = max(2, power_of_two(length, CHUNK))
    chunks, square = -(-length // steps), steps * steps
    pairs = 2 * (square - steps) * size if by_channel else 4 * square * size
    read, state = 2 * square * size, 2 * steps * size * width
    within = pairs + read + 4 * square * width + state
    products, inverses = chunks * within + (chunks - 1) * 2 * state, chunks * steps * square
    unread = read if chunks == 1 else 0  # has no gradient
    rows = batch * heads
    return rows * (products + inverses), rows * (2 * (products - unread) + 3 * inverses)


def _low_rank_flops(q: Sizes, v: Sizes) -> tuple[int, int]:
    """Return the FLOPs of the DPLR delta rule's torch form, forward and backward, for shapes q, v.

    Counted, in the symbols of the torch form: products of pairs of steps; their products with v and
    u; products that write or read states; both parts of the solution for u; and the inverses.
    """
    (batch, length, heads, size), width = q, v[3]
    chunks = -(-length // CHUNK)
    steps = -(-length // chunks)
    square = steps * steps
    within, between = 8 * square * (size + width), 2 * square * size + 8 * steps * size * width
    products, inverses = chunks * within + (chunks - 1) * between, chunks * steps * square
    rows = batch * heads
    return rows * (products + inverses), rows * (2 * products + 3 * inverses)


def _flops(
    q: Sizes, k: Sizes, v: Sizes, a: Sizes | None, b: Any, beta: Any, log_decay: Sizes, *rest: Any
) -> tuple[int, int]:
    """Return the torch form's FLOPs, forward and backward, from the inputs' shapes. The rule is
    the DPLR delta rule if `a` is given, the gated one if `beta` is, else linear attention."""
    if a is not None:
        return _low_rank_flops(q, v)
    if beta is not None:
        return _delta_rule_flops(q, v, by_channel=len(log_decay) == 4)
    return linear_attention_flops(q, k, v)


recurrence = make_operator(
    "recurrence", _forward, _backward, empty=_empty, flops=_flops, num_gradients=7, num_kept=2
)
