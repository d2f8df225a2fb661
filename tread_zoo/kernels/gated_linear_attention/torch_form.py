"""Gated linear attention in plain torch, in chunks that are halved down to single steps.

Step i of a chunk reads W_ij v_j from every step j <= i of the chunk, and the state S before it:

    W_ij = Σ_c q_ic k_jc exp(l_{j+1,c} + … + l_ic)
    o_i  = Σ_j W_ij v_j + (q_i exp(l_1 + … + l_i)) S

A matrix product gives W only if the decay is split into a factor of i and a factor of j. If it is
split at the start of the chunk, the factor of j has a positive exponent and overflows. Here a pair
is split in the middle of the smallest block of 2, 4, 8, … steps that contains both: i is in its
second half, j in its first, and with the decays a = exp(l)

    W_ij = Σ_c (q_ic since_ic) (k_jc until_jc)
    since_i = a_m … a_i,    until_j = a_{j+1} … a_{m-1}

where m is the first step of the second half. All factors are products of decays. So for
any decays nothing overflows, no difference of large sums is taken, and a decay of 0 separates
segments exactly. The factors of the next larger block are made from these by one product each.

Backward goes through the blocks from the largest to the smallest and carries ∂ log since and
∂ log until, which need no division by the decays. For blocks of a single step they are ∂l.

Dimensions: B batch, L length, H heads, T chunks of Q steps, K and V widths of keys and values, h
half of a block; r is the number of heads (of some batch rows) that are computed at a time.
"""

from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import CHUNK, at_least_float32, cut, join, power_of_two, reset
from tread_zoo.kernels.operators import empty_like, make_operator
from tread_zoo.kernels.recurrence import linear_attention_flops

BLOCK_VALUES = 2**18  # B·L·H·K values computed at a time on a CPU: these fit in cache


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [B, L, H, V], the weights W [T, B, H, Q, Q] of pairs of steps (T chunks of Q steps),
    and the states between chunks [T - 1, B, H, K, V]."""
    out, weights, states = _empty(q, k, v, log_decay)
    with torch.autocast(q.device.type, enabled=False):
        for rows, heads in _blocks(q):
            own, *kept = _attend(*_cut(rows, heads, q, k, v, log_decay, segment_ids, scale))
            _join(own, out[rows, :, heads])
            for values, whole in zip(kept, (weights, states), strict=True):
                whole[:, rows, heads] = values.view(whole[:, rows, heads].shape)
    return out, weights, states


def _backward(
    grad: Tensor, weights: Tensor, states: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_decay. `grad` is the gradient of o; `weights` and
    `states` are results of `_forward`, and `args` its arguments."""
    q, *_, scale = args
    gq, gk, gv, gl = map(empty_like, args[:4])
    with torch.autocast(q.device.type, enabled=False):
        for rows, heads in _blocks(q):
            inputs = _cut(rows, heads, *args)
            between, inside = (x[:, rows, heads].flatten(1, 2) for x in (states, weights))
            arriving = _chunked(grad[rows, :, heads].to(weights.dtype))
            to_q, *others = _gradients(*inputs, inside, between, arriving)
            for values, whole in zip((to_q * scale, *others), (gq, gk, gv, gl), strict=True):
                _join(values, whole[rows, :, heads])
    return gq, gk, gv, gl


def _attend(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return o [T, r, Q, V], the weights W of pairs of steps [T, r, Q, Q], and the states between
    chunks [T - 1, r, K, V], for T chunks of Q steps. r counts the heads of all batch rows that are
    computed at once. q, k and log_decay are [T, r, Q, K], v is [T, r, Q, V]."""
    levels, since, until = _decays(log_decay)
    weights = torch.diag_embed((q * k).sum(-1))
    for h, since_mid, until_mid in levels:
        left, right = _halves(k, h)[0] * until_mid, _halves(q, h)[1] * since_mid
        _corners(weights, h).copy_(right @ left.mT)
    out = weights @ v
    states = (k[:-1] * until[:-1]).mT @ v[:-1]
    left_over = since[..., -1, :, None]
    for i in range(1, len(states)):
        states[i].addcmul_(left_over[i], states[i - 1])
    out[1:] += (q[1:] * since[1:]) @ states
    return out, weights, states


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    weights: Tensor,
    states: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and log_decay. `grad` is the gradient of o, [T, r, Q, V];
    `weights` and `states` are results of `_attend`, and the other arguments its arguments."""
    levels, since, until = _decays(log_decay)
    gw, gv = grad @ v.mT, weights.mT @ grad
    own = gw.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    gq, gk = own * k, own * q
    gsince, guntil = torch.zeros_like(q), torch.zeros_like(q)  # gradients of the logarithms

    left, right = k[:-1] * until[:-1], q[1:] * since[1:]
    gstates = right.mT @ grad[1:]
    left_over = since[..., -1, :, None]
    for i in reversed(range(1, len(states))):
        gstates[i - 1].addcmul_(left_over[i], gstates[i])
    gv[:-1] += left @ gstates
    gleft, gright = v[:-1] @ gstates.mT, grad[1:] @ states.mT
    gk[:-1].addcmul_(gleft, until[:-1])
    gq[1:].addcmul_(gright, since[1:])
    guntil[:-1].addcmul_(gleft, left)
    gsince[1:].addcmul_(gright, right)
    passed = (states[:-1] * gstates[1:]).sum(-1)
    gsince[1:-1, :, -1].addcmul_(passed, since[1:-1, :, -1])

    for h, since_mid, until_mid in reversed(levels):
        (gsince_left, gsince_right), guntil_left = _halves(gsince, h), _halves(guntil, h)[0]
        gsince_left[..., -1, :] += gsince_right.sum(-2)
        gsince_right[..., -1, :] += guntil_left.sum(-2)
        left, right = _halves(k, h)[0] * until_mid, _halves(q, h)[1] * since_mid
        block = _corners(gw, h)
        gleft, gright = _product(block.mT, right), _product(block, left)
        _halves(gk, h)[0].addcmul_(gleft, until_mid)
        _halves(gq, h)[1].addcmul_(gright, since_mid)
        guntil_left.addcmul_(gleft, left)
        gsince_right.addcmul_(gright, right)
    return gq, gk, gv, gsince


def _decays(log_decay: Tensor) -> tuple[list[tuple[int, Tensor, Tensor]], Tensor, Tensor]:
    """Return the decays within blocks of every size, and within chunks of Q steps.

    The first result has (h, since, until) for h = 1, 2, 4, …: the decays since and until the middle
    of each block of 2 h steps, [T, r, Q / 2h, h, K]. The others are the decays since the chunk's
    start and until its end.
    """
    since, until, levels = log_decay.exp(), torch.ones_like(log_decay), []
    h = 1
    while h < log_decay.shape[2]:
        (since_left, since_right), until_left = _halves(since, h), _halves(until, h)[0]
        levels.append((h, since_right.clone(), until_left.clone()))
        until_left *= since_right[..., -1:, :]
        since_right *= since_left[..., -1:, :]
        h *= 2
    return levels, since, until


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Return views of x [T, r, Q, F]: the first and the second halves of its blocks of 2h steps,
    [T, r, Q / 2h, h, F] each."""
    left, right = x.unflatten(2, (-1, 2, h)).unbind(3)
    return left, right


def _corners(weights: Tensor, h: int) -> Tensor:
    """Return a view [T, r, Q / 2h, h, h] of `weights` [T, r, Q, Q]: in each block of 2h steps, the
    weights with which the second half of the steps reads the first half."""
    blocks = weights.unflatten(3, (-1, 2 * h)).unflatten(2, (-1, 2 * h))
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2)[..., h:, :h]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; for at most 2 columns of a as a sum, since torch's product is slow there."""
    return (a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2) if a.shape[-1] <= 2 else a @ b


def _cut(
    rows: slice,
    heads: slice,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q times `scale`, k, v and the log-decays of some batch rows and heads (r in all), cut
    into T chunks of Q steps: [T, r, Q, K or V]."""
    dtype = at_least_float32(q, k, v, log_decay)
    queries, keys, values, falls = (x[rows, :, heads].to(dtype) for x in (q, k, v, log_decay))
    falls = reset(falls, None if segment_ids is None else segment_ids[rows])
    return _chunked(queries * scale), _chunked(keys), _chunked(values), _chunked(falls)


def _chunked(x: Tensor) -> Tensor:
    """Return x [B, L, H, F] as T chunks of Q steps, [T, B H, Q, F], contiguous, with zeros after
    the end."""
    return cut(x, power_of_two(x.shape[1], CHUNK)).flatten(1, 2).contiguous()


def _join(x: Tensor, out: Tensor) -> None:
    """Write x [T, B H, Q, F] to out [B, L, H, F]."""
    out.copy_(join(x.unflatten(1, (out.shape[0], out.shape[2])), out.shape[1]))


def _blocks(q: Tensor) -> list[tuple[slice, slice]]:
    """Return pairs of slices (batch rows, heads), to compute one after the other."""
    batch, length, heads, width = q.shape
    num = max(1, BLOCK_VALUES // (length * width)) if q.device.type == "cpu" else batch * heads
    some_rows, some_heads = max(1, num // heads), min(num, heads)
    return [
        (slice(row, row + some_rows), slice(head, head + some_heads))
        for row in range(0, batch, some_rows)
        for head in range(0, heads, some_heads)
    ]


def _empty(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return uninitialised outputs of `_forward`."""
    dtype, steps = at_least_float32(q, k, v, log_decay), power_of_two(q.shape[1], CHUNK)
    batch, length, heads, width = q.shape
    num_chunks = -(-length // steps)
    weights = q.new_empty(num_chunks, batch, heads, steps, steps, dtype=dtype)
    states = q.new_empty(num_chunks - 1, batch, heads, width, v.shape[3], dtype=dtype)
    return empty_like(v), weights, states


gated_linear_attention_torch = make_operator(
    "gated_linear_attention",
    _forward,
    _backward,
    empty=_empty,
    flops=linear_attention_flops,
    num_gradients=4,
    num_kept=2,
)
