"""The bidirectional WKV in plain torch: two linear scans, carried in log space.

A token's sums over those before it and over those after it follow the same recurrence, once in
each direction. With s = w/T, d_t the distance from step t to the next, e_t = k_t - (d_t - 1) s,

    m_{t+1} = max(m_t - d_t s, e_t)                       the largest log-weight so far
    a_t = exp(m_t - d_t s - m_{t+1}),   b_t = exp(e_t - m_{t+1})
    h_{t+1} = a_t h_t + b_t (v_t, 1)                      the two sums, over exp(m_{t+1})

A token's two sums of both directions and its own term, exp(u + k_t) (v_t, 1), are put on their
largest exponent r_t; the quotient is the output. Every exponent is at most 0 and the largest one of
a sum is 0, so nothing overflows and no quotient is 0/0, however long the decay or large the keys.

Backward computes all this again. With c_t = exp(m_t - r_t), g_t = (∂N_t, ∂D_t) the gradients of
the quotient's two parts and f_t = exp(u + k_t - r_t),

    G_t = c_t g_t + a_t G_{t+1},   in_t = b_t G_{t+1},   q_t = a_t h_t · G_{t+1}
    (∂v_t, x_t) = Σ_directions in_t + f_t g_t,           ∂k_t = v_t ∂v_t + x_t
    ∂u = Σ f_t (v_t, 1) · g_t,   ∂s = - Σ d_t q_t + (d_t - 1) (v_t, 1) · in_t

No gradient passes through m and r: they cancel. All steps share each operation but those of the
recurrences of m, h and G, four a step for both directions.

Dimensions: B batch, L length, C channels, R rows of the batch done at a time. Tensors are
time-major: [L, 2, R, C] with the direction second, the backward one in its own time, last first.
"""

import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

LOG2_E = math.log2(math.e)
BLOCK_VALUES = 2**18  # B·L·C values done at a time on a CPU: the tensors of a block fit in cache
LOWEST = -1e30  # the log-weight of nothing; not -inf, whose differences are NaN


class _Inputs(NamedTuple):
    """Some rows of the batch, in the state's dtype.

    k, v: [L, R, C]. u: [C]. s: [C]. gaps: d_t in both directions, [L - 1, 2, R, 1]; None where
    every distance is 1.
    """

    k: Tensor
    v: Tensor
    u: Tensor
    s: Tensor
    gaps: Tensor | None


class _Scan(NamedTuple):
    """Memory of one pass, used for every block of rows.

    m, then c: [L, 2, R, C]. a, b: [L - 1, 2, R, C]. h: [L, 2 sums, 2, R, C]. For backward, G like h
    and g [L, 2 sums, R, C].
    """

    m: Tensor
    a: Tensor
    b: Tensor
    h: Tensor
    g: Tensor
    G: Tensor


class _Mean(NamedTuple):
    """own: f, inverse: 1 / D, out: N / D, each [L, R, C]."""

    own: Tensor
    inverse: Tensor
    out: Tensor


def bidirectional_wkv_torch(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return the WKV; see `tread_zoo.kernels.bidirectional_wkv`."""
    return _forward(k, v, w, u, positions, length)


@torch.library.custom_op("tread_zoo::bidirectional_wkv", mutates_args=())
def _forward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return out [B, L, C]."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    with torch.autocast(k.device.type, enabled=False):
        blocks = _blocks(k)
        memory = _memory(k, v, blocks, count=6)
        for rows in blocks:
            inputs = _prepare(k, v, w, u, positions, length, rows)
            scan = _views(memory, inputs.k.shape)
            _run(inputs, scan)
            out[rows] = _weigh(inputs, scan).out.transpose(0, 1)
    return out


@torch.library.custom_op("tread_zoo::bidirectional_wkv_backward", mutates_args=())
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
    gk, gv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    dtype = _state_dtype(k, v)
    gs, gu = (torch.zeros(w.shape, dtype=dtype, device=w.device) for _ in range(2))
    with torch.autocast(k.device.type, enabled=False):
        blocks = _blocks(k)
        memory = _memory(k, v, blocks, count=8)
        for rows in blocks:
            inputs = _prepare(k, v, w, u, positions, length, rows)
            scan = _views(memory, inputs.k.shape)
            slope, bonus = _backward_block(inputs, scan, grad[rows].to(dtype).transpose(0, 1))
            gk[rows], gv[rows] = scan.g[:, 1].transpose(0, 1), scan.g[:, 0].transpose(0, 1)
            gs += slope
            gu += bonus
    return gk, gv, (gs / length).to(w.dtype), gu.to(u.dtype)


def _backward_block(inputs: _Inputs, scan: _Scan, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Write ∂v and ∂k to the two halves of g, and return ∂s and ∂u [C], from grad [L, R, C]."""
    _run(inputs, scan)
    mean = _weigh(inputs, scan)
    g, G = scan.g, scan.G
    torch.mul(grad, mean.inverse, out=g[:, 0])
    torch.mul(g[:, 0], mean.out, out=g[:, 1]).neg_()
    torch.mul(g, scan.m[:, None, 0], out=G[:, :, 0])
    torch.mul(g.flip(0), scan.m[:, None, 1], out=G[:, :, 1])
    decays, steps = scan.a.unsqueeze(1).unbind(0), G.unbind(0)
    for t in range(len(decays) - 1, 0, -1):
        steps[t].addcmul_(decays[t], steps[t + 1])
    arriving = G[1:]
    slope = _slope(inputs, scan, arriving)
    arriving.mul_(scan.b.unsqueeze(1))
    g.mul_(mean.own.unsqueeze(1))
    value, key = g[:, 0], g[:, 1]
    bonus = torch.addcmul(key, inputs.v, value).sum((0, 1))
    g[:-1] += arriving[:, :, 0]
    g[1:] += arriving[:, :, 1].flip(0)
    key.addcmul_(inputs.v, value)
    return slope, bonus


def _slope(inputs: _Inputs, scan: _Scan, later: Tensor) -> Tensor:
    """Return ∂s [C] from G_{t+1} [L - 1, 2 sums, 2, R, C]; uses the memory of c."""
    q = torch.mul(scan.h[:-1, 0], later[:, 0], out=scan.m[1:])
    q.addcmul_(scan.h[:-1, 1], later[:, 1]).mul_(scan.a)
    if inputs.gaps is not None:
        entered = _both_ways(inputs.v)[:-1].mul_(later[:, 0]).add_(later[:, 1]).mul_(scan.b)
        q.mul_(inputs.gaps).addcmul_(entered, inputs.gaps - 1)
    return -q.sum((0, 1, 2))


def _run(inputs: _Inputs, scan: _Scan) -> None:
    """Run both directions: fill m, a, b and h."""
    m, a, b, h = scan.m, scan.a, scan.b, scan.h
    falls = inputs.s
    steps: Iterable[Tensor] = repeat(inputs.s, len(b))
    b[:, 0] = inputs.k[:-1]
    b[:, 1] = inputs.k[1:].flip(0)
    if inputs.gaps is not None:
        b.addcmul_(inputs.gaps - 1, inputs.s, value=-1)
        falls = inputs.gaps * inputs.s
        steps = falls.unbind(0)
    m[0].fill_(LOWEST)
    peaks = m.unbind(0)
    for t, (fall, key) in enumerate(zip(steps, b.unbind(0), strict=True)):
        torch.sub(peaks[t], fall, out=peaks[t + 1])
        torch.maximum(peaks[t + 1], key, out=peaks[t + 1])
    _exp_(torch.sub(m[:-1], m[1:], out=a).sub_(falls))
    _exp_(b.sub_(m[1:]))
    torch.mul(inputs.v[:-1], b[:, 0], out=h[1:, 0, 0])
    torch.mul(inputs.v[1:].flip(0), b[:, 1], out=h[1:, 0, 1])
    h[1:, 1] = b
    h[0].zero_()
    sums = h.unbind(0)
    for t, decay in enumerate(a.unbind(0)):
        if t > 0:  # there is nothing before the first step
            sums[t + 1].addcmul_(decay, sums[t])


def _weigh(inputs: _Inputs, scan: _Scan) -> _Mean:
    """Put the sums of both directions and the token's own term together; turns m into c."""
    c, h = scan.m, scan.h
    r = torch.maximum(c[:, 0], c[:, 1].flip(0))
    torch.maximum(r, inputs.k + inputs.u, out=r)
    c[:, 0] -= r
    c[:, 1] -= r.flip(0)
    _exp_(c)
    own = _exp_(torch.sub(inputs.k, r, out=r).add_(inputs.u))  # k - r first: it is nearly exact
    sums = torch.mul(h[:, :, 1], c[:, None, 1], out=scan.g).flip(0)
    sums.addcmul_(h[:, :, 0], c[:, None, 0])
    inverse = sums[:, 1].add_(own).reciprocal_()
    return _Mean(own, inverse, sums[:, 0].addcmul_(own, inputs.v).mul_(inverse))


def _prepare(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    positions: Tensor | None,
    length: int,
    rows: slice,
) -> _Inputs:
    dtype = _state_dtype(k, v)
    gaps = None
    if positions is not None:
        apart = positions[rows].diff(dim=1).t().to(dtype)
        gaps = torch.stack([apart, apart.flip(0)], dim=1).unsqueeze(-1)
    keys, values = (x[rows].to(dtype).transpose(0, 1) for x in (k, v))
    return _Inputs(keys, values, u.to(dtype), w.to(dtype) / length, gaps)


def _memory(k: Tensor, v: Tensor, blocks: list[slice], count: int) -> Tensor:
    """Return memory for `count` tensors [L, 2, R, C] of the largest block, the first."""
    size = 2 * k[blocks[0]].numel()
    return torch.empty(count, size, dtype=_state_dtype(k, v), device=k.device)


def _views(memory: Tensor, shape: torch.Size) -> _Scan:
    """Return the tensors of a block of `shape` (L, R, C) in `memory`."""
    length, batch, channels = shape
    size = 2 * shape.numel()
    one, two = (length, 2, batch, channels), (length, 2, 2, batch, channels)
    m, a, b, g = (x[:size].view(one) for x in memory[:4])
    h, G = (x.flatten()[: 2 * size].view(two) for x in (memory[4:6], memory[-2:]))
    return _Scan(m, a[:-1], b[:-1], h, g, G)


def _exp_(x: Tensor) -> Tensor:
    """exp in place, as 2^(x / ln 2), the quicker of the two on a CPU. To divide the differences
    keeps large keys exact, which to divide the keys would not."""
    return x.mul_(LOG2_E).exp2_()


def _both_ways(x: Tensor) -> Tensor:
    """[L, R, C] -> [L, 2, R, C]: as it is, and last first."""
    return torch.stack([x, x.flip(0)], dim=1)


def _state_dtype(k: Tensor, v: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)


def _blocks(k: Tensor) -> list[slice]:
    """Return the rows of the batch that are done at a time."""
    num_rows = len(k)
    if k.device.type == "cpu":
        num_blocks = -(-k.numel() // BLOCK_VALUES)
        num_rows = -(-len(k) // min(len(k), num_blocks))
    return [slice(row, min(row + num_rows, len(k))) for row in range(0, len(k), num_rows)]


@_forward.register_fake
def _(k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@_backward.register_fake
def _(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    positions: Tensor | None,
    length: int,
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v, w, u))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.length = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # read once: recomputation in the backward pass allows no more
    return *_backward(grad, *saved, ctx.length), None, None


_forward.register_autograd(_differentiate, setup_context=_save)


@register_flop_formula(torch.ops.tread_zoo.bidirectional_wkv)
def _forward_flops(k: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """54 B L C: 21 a direction (m 2, a 4, b 3, h 5, c 3, c h 4) and 12 for r, f, N, D and N / D."""
    return 54 * math.prod(k)


@register_flop_formula(torch.ops.tread_zoo.bidirectional_wkv_backward)
def _backward_flops(grad: tuple[int, ...], k: tuple[int, ...], *args: Any, **kwargs: Any) -> int:
    """94 B L C: the 54 again, 15 a direction (c g 2, G 4, q and ∂s 5, in 4), 10 for g, ∂k, ∂u."""
    return 94 * math.prod(k)
