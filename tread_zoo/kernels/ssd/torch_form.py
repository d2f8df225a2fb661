"""The state-space dual in plain torch: matrix products within chunks, a short scan between them.

    h_t = exp(l_t) h_{t-1} + x_t ⊗ B_t,  y_t = h_t C_t + D u_t,  x_t = Δ_t u_t,  l_t = gaps_t Δ_t A

with u the inputs (Mamba-2, arXiv 2405.21060, section 6). In a chunk of Q steps, with s_i the sum
l_1 + … + l_i, h the state before the chunk and h' the one after it,

    W_ij = (C_i · B_j) exp(s_i - s_j) for j <= i, else 0
    y_i  = Σ_j W_ij x_j + exp(s_i) h C_i + D u_i
    h'   = exp(s_Q) h + Σ_j exp(s_Q - s_j) x_j ⊗ B_j

and backward, with g' the gradient of h' and V_ij = ∂y_i · x_j,

    g    = exp(s_Q) g' + Σ_i exp(s_i) ∂y_i ⊗ C_i
    ∂x_j = Σ_i W_ij ∂y_i + exp(s_Q - s_j) g' B_j
    ∂C_i = Σ_heads Σ_j V_ij exp(s_i - s_j) B_j + exp(s_i) hᵀ ∂y_i,   ∂B_j in the same way
    ∂l_k = Σ_{j < k <= i} V_ij W_ij + Σ_{i >= k} exp(s_i) ∂y_i · h C_i
           + Σ_{j < k} exp(s_Q - s_j) x_j · g' B_j + exp(s_Q) g' · h

No exponent is above 0 where A < 0. After some strong decays, a difference of float32 sums would
lose its digits, so the sums are computed in float64 and stored as two float32 values. Pairs of
steps in different segments are masked, not decayed.

The heads of a group share B and C, so one product with the states serves all of them. Autograd
keeps the states between the chunks; backward recomputes everything else.

Dimensions: B batch, L length, H heads, P width of a head, N states, G groups, R = H / G heads of a
group, T chunks of Q steps. Tensors are chunk-major, [T, K, ...] with K = B G.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, cut, row_blocks, segment_starts
from tread_zoo.kernels.operators import empty_like, make_operator

CHUNK = 64  # steps of a chunk at most
BLOCK_VALUES = 2**17  # B·L·H·P values computed at a time on a CPU: these fit in cache


class _Decays(NamedTuple):
    """The decays between the Q steps of each of T chunks. K counts the groups of all batch rows
    computed at once; each has R heads. s_i is the sum of a chunk's log-decays up to step i.

    apart: exp(s_i - s_j) where j <= i, else 1, [T, K, R, Q, Q].
    since: exp(s_i), but 0 if a segment starts at step i or before it, [T, K, R, Q].
    until: exp(s_Q - s_j), but 0 if a segment starts after step j, [T, K, R, Q].
    joined: 1 where j <= i and both are of one segment, else 0, [T, K, Q, Q]; without segments
        [1, 1, Q, Q].
    """

    apart: Tensor
    since: Tensor
    until: Tensor
    joined: Tensor


class _Chunks(NamedTuple):
    """The inputs of some batch rows in the state's dtype, cut into T chunks of Q steps. K counts
    the groups of all these rows; each has R heads. `u` is the input, and `x` is u times delta.

    u, x: [T, K, R, Q, P]. delta: [T, K, R, Q]. A: [K, R, 1]. B, C: [T, K, Q, N].
    D: [K, R, 1, 1] or None. gaps: [T, K, 1, Q] or None.
    """

    u: Tensor
    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    gaps: Tensor | None
    decays: _Decays


class _Grads(NamedTuple):
    """Gradients of the inputs: `x` is the gradient of u. A and D are [K, R], the others have the
    shapes of `_Chunks`."""

    x: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor


def _forward(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
    gaps: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return y [B, L, H, P] and the states between the T chunks, [T - 1, B, G, N, R P] with
    R = H / G."""
    y = _empty_padded(x)
    states = x.new_empty(_states_shape(x, B), dtype=at_least_float32(x, delta))
    with torch.autocast(x.device.type, enabled=False):
        for rows in row_blocks(x, BLOCK_VALUES):
            chunks = _prepare(rows, x, delta, A, B, C, D, segment_ids, gaps)
            between = _scan(chunks)
            _join(_outputs(chunks, between), y[rows], B.shape[2])
            states[:, rows] = between.view(states[:, rows].shape)
    return y[:, : x.shape[1]].contiguous(), states


def _backward(grad_y: Tensor, states: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, delta, A, B, C and D (empty where D is None)."""
    x, delta, A, B, C, D, *_ = args
    length, groups = x.shape[1], B.shape[2]
    gx, gd, gB, gC = (_empty_padded(v) for v in (x, delta, B, C))
    gA, gD = (A.new_zeros(groups, len(A) // groups, dtype=states.dtype) for _ in range(2))
    with torch.autocast(x.device.type, enabled=False):
        for rows in row_blocks(x, BLOCK_VALUES):
            chunks = _prepare(rows, *args)
            between = states[:, rows].contiguous().flatten(1, 2)
            grads = _gradients(chunks, between, _cut(grad_y[rows], groups, states.dtype))
            _join(grads.x, gx[rows], groups)
            _join(grads.delta.unsqueeze(-1), gd[rows].unsqueeze(-1), groups)
            _join(grads.B.unsqueeze(2), gB[rows], groups)
            _join(grads.C.unsqueeze(2), gC[rows], groups)
            gA += grads.A.unflatten(0, (-1, groups)).sum(0)
            gD += grads.D.unflatten(0, (-1, groups)).sum(0)
    gx, gd, gB, gC = (v[:, :length].contiguous() for v in (gx, gd, gB, gC))
    gD = x.new_empty(0) if D is None else gD.flatten().to(D.dtype)
    return gx, gd, gA.flatten().to(A.dtype), gB, gC, gD


def _scan(c: _Chunks) -> Tensor:
    """Return the states before all chunks but the first, [T - 1, K, N, R P]."""
    left = _steps_first(c.x[:-1], c.decays.until[:-1])
    states = _bmm(c.B[:-1].mT, left)
    parts = states.unflatten(-1, (c.A.shape[1], -1)).unbind(0)
    for i, total in enumerate(_totals(c)[:, :, None, :, None].unbind(0)):
        parts[i + 1].addcmul_(parts[i], total)
    return states


def _totals(c: _Chunks) -> Tensor:
    """Return the decay over each chunk but the first and the last, [T - 2, K, R]."""
    return c.decays.since[1:-1, ..., -1]


def _outputs(c: _Chunks, states: Tensor) -> Tensor:
    """Return y [T, K, R, Q, P] from the states between the chunks. Overwrites `c.decays.apart`."""
    y = _bmm(_weights(c, out=c.decays.apart), c.x)
    if len(states):
        arriving = _heads_first(_bmm(c.C[1:], states), c.A.shape[1])
        y[1:].addcmul_(arriving, c.decays.since[1:].unsqueeze(-1))
    return y if c.D is None else y.addcmul_(c.u, c.D)


def _weights(c: _Chunks, out: Tensor | None = None) -> Tensor:
    """Return the weights W of pairs of steps, [T, K, R, Q, Q]; see the module. They are written to
    `out` if it is not None."""
    scores = _bmm(c.C, c.B.mT).mul_(c.decays.joined)
    return torch.mul(c.decays.apart, scores.unsqueeze(2), out=out)


def _gradients(c: _Chunks, states: Tensor, gy: Tensor) -> _Grads:
    """Return the inputs' gradients, from the states between the chunks and the gradient gy of y,
    [T, K, R, Q, P]. Overwrites `c.x`."""
    weights, gw = _weights(c), _bmm(gy, c.x.mT)
    gx = _bmm(weights.mT, gy)
    pairs = weights.mul_(gw)
    gscores = gw.mul_(c.decays.apart).sum(2).mul_(c.decays.joined)
    gB, gC = _bmm(gscores.mT, c.C), _bmm(gscores, c.B)
    # Sum over the pairs around step k only. A difference of two sums over all later pairs would
    # keep their rounding error, which ∂A multiplies by Δ_k, however large.
    earlier = torch.ones_like(pairs[0, 0, 0]).triu_(1)
    gfalls = torch.matmul(pairs, earlier, out=gw).tril_().sum(-2)
    if len(states):
        _add_between(c, states, gy, gx, gB, gC, gfalls)
    if c.gaps is not None:
        gfalls *= c.gaps
    gA, gD = (gfalls * c.delta).sum((0, 3)), torch.zeros_like(gfalls[0, ..., 0])
    gdelta = torch.mul(gx, c.u, out=c.x).sum(-1).addcmul_(gfalls, c.A)
    gx.mul_(c.delta.unsqueeze(-1))
    if c.D is not None:
        gx.addcmul_(gy, c.D)
        gD = torch.mul(gy, c.u, out=c.x).sum((0, 3, 4))
    return _Grads(gx, gdelta, gA, gB, gC, gD)


def _add_between(
    c: _Chunks, states: Tensor, gy: Tensor, gx: Tensor, gB: Tensor, gC: Tensor, gfalls: Tensor
) -> None:
    """Add the terms that pass through `states`, the states between the chunks, to the gradients of
    x, B, C and the log-decays (gfalls, [T, K, R, Q]). gy is the gradient of y."""
    heads, since, until = c.A.shape[1], c.decays.since[1:], c.decays.until[:-1]
    left, gout = _steps_first(c.x[:-1], until), _steps_first(gy[1:], since)
    gstates = _bmm(c.C[1:].mT, gout)
    parts = gstates.unflatten(-1, (heads, -1)).unbind(0)
    for i, total in reversed(list(enumerate(_totals(c)[:, :, None, :, None].unbind(0)))):
        parts[i].addcmul_(parts[i + 1], total)
    gB[:-1] += _bmm(left, gstates.mT)
    gC[1:] += _bmm(gout, states.mT)
    arriving = _bmm(c.C[1:], states).mul_(gout)
    gfalls[1:] += _heads_first(arriving, heads).sum(-1).flip(-1).cumsum(-1).flip(-1)
    reaching = _bmm(c.B[:-1], gstates)
    gx[:-1].addcmul_(_heads_first(reaching, heads), until.unsqueeze(-1))
    entered = _heads_first(reaching.mul_(left), heads).sum(-1).cumsum(-1)
    gfalls[:-1, ..., 1:] += entered[..., :-1]
    through = (states[:-1] * gstates[1:]).sum(2).unflatten(-1, (heads, -1)).sum(-1)
    gfalls[1:-1] += through.mul_(_totals(c)).unsqueeze(-1)


def _prepare(
    rows: slice,
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
    gaps: Tensor | None,
) -> _Chunks:
    """Return the inputs for the batch's `rows`, cut into chunks."""
    dtype, groups, batch = at_least_float32(x, delta), B.shape[2], len(x[rows])
    u = _cut(x[rows], groups, dtype)
    steps = _cut(delta[rows].unsqueeze(-1), groups, dtype).squeeze(-1)
    rates = _per_head(A, batch, groups, dtype)
    spread = _cut_tokens(gaps, rows, groups, dtype)
    falls = steps * rates
    starts = None if segment_ids is None else segment_starts(segment_ids)
    return _Chunks(
        u=u,
        x=u * steps.unsqueeze(-1),
        delta=steps,
        A=rates,
        B=_cut(B[rows], groups, dtype).squeeze(2),
        C=_cut(C[rows], groups, dtype).squeeze(2),
        D=None if D is None else _per_head(D, batch, groups, dtype).unsqueeze(-1),
        gaps=spread,
        decays=_decay(
            falls if spread is None else falls * spread, _cut_tokens(starts, rows, groups, dtype)
        ),
    )


def _decay(falls: Tensor, starts: Tensor | None) -> _Decays:
    """Return the decays for the log-decays l, `falls` [T, K, R, Q]; `starts` is 1 where a segment
    begins [T, K, 1, Q]."""
    wide = torch.float32 if falls.device.type == "mps" else torch.float64  # mps has no float64
    sums = falls.to(wide).cumsum(-1) / math.log(2)  # 2^x is quicker than e^x on a CPU
    high = sums.to(falls.dtype)
    low = (sums - high).to(falls.dtype)
    apart = high.unsqueeze(-1) - high.unsqueeze(-2)  # a small difference is exact
    apart.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2)).tril_().exp2_()
    since, until = high.exp2(), (sums[..., -1:] - sums).to(falls.dtype).exp2_()
    joined = torch.ones_like(apart[:1, :1, 0]).tril_()
    if starts is None:
        return _Decays(apart, since, until, joined)
    number = starts.cumsum(-1)  # number of the segment in the chunk; 0 continues from before
    since *= number == 0
    until *= number == number[..., -1:]
    same = number.mT == number
    return _Decays(apart, since, until, joined * same)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b; all dimensions but the last two are one batch."""
    product = torch.bmm(a.flatten(0, -3), b.flatten(0, -3))
    return product.view(*a.shape[:-1], b.shape[-1])


def _steps_first(values: Tensor, weights: Tensor) -> Tensor:
    """Return values [T, K, R, Q, P] times weights [T, K, R, Q], as [T, K, Q, R P]."""
    num_chunks, num, heads, steps, width = values.shape
    out = values.new_empty(num_chunks, num, steps, heads, width)
    torch.mul(values.transpose(2, 3), weights.transpose(2, 3).unsqueeze(-1), out=out)
    return out.flatten(3)


def _heads_first(values: Tensor, heads: int) -> Tensor:
    """Return `values` [T, K, Q, R P] as a view [T, K, R, Q, P]."""
    return values.unflatten(-1, (heads, -1)).transpose(2, 3)


def _cut(values: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """Return `values` [B, L, H, F] in `dtype` as T chunks of Q steps, with K = B * `groups` and
    R = H / `groups`: [T, K, R, Q, F], contiguous, with zeros after the end."""
    return _chunked(values.to(dtype), groups).contiguous().flatten(1, 2)


def _cut_tokens(
    values: Tensor | None, rows: slice, groups: int, dtype: torch.dtype
) -> Tensor | None:
    """Return the `rows` of `values` [B, L] in `dtype` as T chunks of Q steps, repeated for each of
    a row's `groups`: [T, K, 1, Q], K the groups of all these rows. Return None for None."""
    if values is None:
        return None
    shaped = values[rows, :, None, None].expand(-1, -1, groups, -1)
    return _cut(shaped, groups, dtype).squeeze(-1)


def _per_head(values: Tensor, batch: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Return `values` [H] in `dtype` as [K, R, 1], with K = `batch` * `groups` and
    R = H / `groups`, equal for all rows of the batch."""
    heads = values.to(dtype).view(1, groups, -1, 1)
    return heads.expand(batch, -1, -1, -1).flatten(0, 1)


def _join(values: Tensor, out: Tensor, groups: int) -> None:
    """Write `values` [T, K, R, Q, F], with K = B * `groups`, to `out` [B, T Q, H, F]."""
    _chunked(out, groups).copy_(values.unflatten(1, (-1, groups)))


def _chunked(values: Tensor, groups: int) -> Tensor:
    """Return `values` [B, L, H, F] as [T, B, G, R, Q, F], a view unless it must be padded."""
    return cut(values, _spans(values.shape[1])[1]).unflatten(2, (groups, -1))


def _spans(length: int) -> tuple[int, int]:
    """Return T and Q: the fewest chunks that hold `length` steps, and the number of steps in each,
    at most `CHUNK`."""
    num_chunks = -(-length // CHUNK)
    return num_chunks, -(-length // num_chunks)


def _empty_padded(values: Tensor) -> Tensor:
    """Return uninitialised memory [B, T Q, ...] for `values` [B, L, ...] that are padded to T whole
    chunks of Q steps."""
    num_chunks, span = _spans(values.shape[1])
    return values.new_empty(len(values), num_chunks * span, *values.shape[2:])


def _states_shape(x: Tensor, B: Tensor) -> tuple[int, ...]:
    batch, length, heads, width = x.shape
    groups, size = B.shape[2:]
    return _spans(length)[0] - 1, batch, groups, size, heads // groups * width


def _empty(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, *rest: Tensor | None
) -> tuple[Tensor, Tensor]:
    dtype = at_least_float32(x, delta)
    return empty_like(x), x.new_empty(_states_shape(x, B), dtype=dtype)


def _flops(
    x: tuple[int, ...], delta: tuple[int, ...], A: tuple[int, ...], B: tuple[int, ...], *args: Any
) -> tuple[int, int]:
    """Return the FLOPs of the matrix products, forward and backward.

    Forward, in the module's symbols: C Bᵀ, W x, what x adds to the states, and what y reads from
    the states. Backward: C Bᵀ and its two gradients, the gradients of W and x, ∂l, and five
    products with states.
    """
    (batch, length, heads, width), (groups, size) = x, B[2:]
    num_chunks, steps = _spans(length)
    pairs = 2 * batch * num_chunks * steps * steps
    scores, weighted, summed = pairs * groups * size, pairs * heads * width, pairs * heads * steps
    between = 2 * batch * (num_chunks - 1) * steps * heads * width * size
    forward = scores + weighted + 2 * between
    return forward, 3 * scores + 2 * weighted + summed + 5 * between


ssd_torch = make_operator(
    "ssd",
    _forward,
    _backward,
    empty=_empty,
    flops=_flops,
    num_gradients=6,
    num_kept=1,
)
