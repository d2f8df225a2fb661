"""The bidirectional WKV in plain torch: two linear scans, carried in log space.

The output of a token is N / D: a weighted sum N of values, over the sum D of the weights. One
recurrence sums over the tokens before a token, and in the other direction over those after it. With
s = w/T, d_t the distance from step t to the next, e_t = k_t - (d_t - 1) s,

    m_{t+1} = max(m_t - d_t s, e_t)                       the largest log-weight so far
    a_t = exp(m_t - d_t s - m_{t+1}),   b_t = exp(e_t - m_{t+1})
    h_{t+1} = a_t h_t + b_t (v_t, 1)                      both sums so far, over exp(m_{t+1})

The sums of both directions and the token's own term, exp(u + k_t) (v_t, 1), are scaled by exp(-r_t)
and added up to (N_t, D_t); r_t is the largest of their exponents. Every exponent is at most 0 and
the largest one of a sum is 0, so nothing overflows and no quotient is 0/0, however long the decay
or large the keys.

Backward computes all this again. With c_t = exp(m_t - r_t), g_t = (∂N_t, ∂D_t) and
f_t = exp(u + k_t - r_t),

    G_t = c_t g_t + a_t G_{t+1},   in_t = b_t G_{t+1},   q_t = a_t h_t · G_{t+1}
    (∂v_t, x_t) = Σ_directions in_t + f_t g_t,           ∂k_t = v_t ∂v_t + x_t
    ∂u = Σ f_t (v_t, 1) · g_t,   ∂s = - Σ d_t q_t + (d_t - 1) (v_t, 1) · in_t

No gradient passes through m and r: they cancel. Each operation runs once for all steps, except the
recurrences of m, h and G. These take four operations per step, for both directions together.
Autograd keeps only the inputs.

Dimensions: B batch, L length, T length of the whole sequence, C channels, R rows of the batch that
are computed at a time. Tensors are time-major, [L, 2, R, C]: the second axis is the direction. In
the backward direction, the last step comes first.
"""

import math
from collections.abc import Iterable
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, row_blocks
from tread_zoo.kernels.operators import empty_like, make_operator

BLOCK_VALUES = 2**18  # B·L·C values done at a time on a CPU: the tensors of a block fit in cache
LOWEST = -1e30  # the log-weight of nothing; not -inf, whose differences are NaN
LOG2_E = math.log2(math.e)


def _forward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return the output [B, L, C]."""
    out = empty_like(v)
    memory = _Memory(k, at_least_float32(k, v))
    with torch.autocast(k.device.type, enabled=False):
        for rows in row_blocks(k, BLOCK_VALUES):
            inputs = _prepare(rows, k, v, w, u, positions, length)
            scan = _lend(memory, inputs, count=6)
            _run(inputs, scan)
            out[rows].transpose(0, 1).copy_(_weigh(inputs, scan).out)
    return out


def _backward(
    grad: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *places: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, w and u. `grad` is the gradient of the output; `places` are
    `positions` and `length`."""
    gk, gv = empty_like(k), empty_like(v)
    dtype = at_least_float32(k, v)
    gs, gu = (torch.zeros(w.shape, dtype=dtype, device=w.device) for _ in range(2))
    memory = _Memory(k, dtype)
    with torch.autocast(k.device.type, enabled=False):
        for rows in row_blocks(k, BLOCK_VALUES):
            inputs = _prepare(rows, k, v, w, u, *places)
            parts = [x[rows].transpose(0, 1) for x in (grad, gk, gv)]
            parts[0] = parts[0].to(dtype)
            slope, bonus = _gradients(inputs, memory, *parts)
            gs += slope
            gu += bonus
    return gk, gv, (gs / places[1]).to(w.dtype), gu.to(u.dtype)


def flops(k: tuple[int, ...], *args: Any) -> tuple[int, int]:
    """Return the FLOPs of the forward pass, 54 B L C, and of the backward pass, 94 B L C.

    In the module's symbols, forward takes 21 per direction (m 2, a 4, b 3, h 5, c 3, c h 4), and 12
    for r, f, N, D and N / D. Backward takes the same 54, then 15 per direction (c g 2, G 4, q and
    ∂s 5, in 4), and 10 for g, ∂k and ∂u.
    """
    return 54 * math.prod(k), 94 * math.prod(k)


def outputs_like(k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialised tensors [B, L, C] for the output and for the logarithm ℓ of the output's
    denominator (float32)."""
    return empty_like(v), torch.empty(k.shape, dtype=torch.float32, device=k.device)


class _Inputs(NamedTuple):
    """The inputs for R rows of the batch, time-major, in the dtype of the sums.

    k, v: [L, R, C]. s: the decay per step, w divided by the length of the whole sequence, [C].
    u: the bonus, [C]. places: the positions [L, R, 1]; None where they are 0 … L-1.
    """

    k: Tensor
    v: Tensor
    s: Tensor
    u: Tensor
    places: Tensor | None


def _prepare(
    rows: slice, k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> _Inputs:
    """Return the arguments of `bidirectional_wkv` for the batch's `rows`, time-major."""
    dtype = at_least_float32(k, v)
    keys, values = (x[rows].to(dtype).transpose(0, 1) for x in (k, v))
    places = None if positions is None else positions[rows].t().to(dtype).unsqueeze(-1)
    return _Inputs(keys, values, w.to(dtype) / length, u.to(dtype), places)


class _Memory:
    """Memory for a block of rows, used again by the next block, so that a call allocates once."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._flat = torch.empty(0, dtype=dtype, device=like.device)

    def lend(self, *shape: int) -> Tensor:
        """Return an uninitialised tensor of `shape`, in the same memory as those lent before."""
        size = math.prod(shape)
        if self._flat.numel() < size:
            self._flat = self._flat.new_empty(size)
        return self._flat[:size].view(shape)


def _exp(x: Tensor) -> Tensor:
    """Compute exp in place, as 2^(x / ln 2), which is faster on a CPU. x is a difference of
    log-weights: if keys were divided by ln 2 before the subtraction, large ones lost digits."""
    return x.mul_(LOG2_E).exp2_()


class _Scan(NamedTuple):
    """Memory for one pass over R rows of the batch. The fields are the module's symbols, for both
    directions (an axis of 2).

    m: [L, 2, R, C]; `_weigh` turns it into c. a, b: [L - 1, 2, R, C]. h: [L, 2 sums, 2, R, C]. G:
    shaped like h, for the backward pass only. g: [L, 2 sums, R, C], which `_weigh` uses as scratch.
    gaps: the distances d between steps, [L - 1, 2, R, 1]; None where every distance is 1.
    """

    m: Tensor
    a: Tensor
    b: Tensor
    h: Tensor
    g: Tensor
    G: Tensor
    gaps: Tensor | None


class _Mean(NamedTuple):
    """The output, a weighted mean of the values, and what its gradients need, each [L, R, C].

    own: the weight of the token's own value. inverse: 1 / (the sum of the weights). out: the mean.
    """

    own: Tensor
    inverse: Tensor
    out: Tensor


def _gradients(
    inputs: _Inputs, memory: _Memory, grad: Tensor, gk: Tensor, gv: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the gradients of k and v to `gk` and `gv` [L, R, C], and return those of s = w/T and u,
    [C] each; `grad` [L, R, C] is the output's gradient."""
    scan = _lend(memory, inputs, count=8)
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
    gv.copy_(value)
    torch.addcmul(key, inputs.v, value, out=gk)
    return slope, bonus


def _slope(inputs: _Inputs, scan: _Scan, later: Tensor) -> Tensor:
    """Return the gradient of s = w/T, [C]. Overwrites `scan.m`.

    later: G_{t+1}, the gradient of h_{t+1}, [L - 1, 2 sums, 2, R, C].
    """
    q = torch.mul(scan.h[:-1, 0], later[:, 0], out=scan.m[1:])
    q.addcmul_(scan.h[:-1, 1], later[:, 1]).mul_(scan.a)
    if scan.gaps is not None:
        entered = _both_ways(inputs.v)[:-1].mul_(later[:, 0]).add_(later[:, 1]).mul_(scan.b)
        q.mul_(scan.gaps).addcmul_(entered, scan.gaps - 1)
    return -q.sum((0, 1, 2))


def _run(inputs: _Inputs, scan: _Scan) -> None:
    """Run the recurrence in both directions, and write its m, a, b and h (see the module) to
    `scan`."""
    m, a, b, h = scan.m, scan.a, scan.b, scan.h
    falls = inputs.s
    steps: Iterable[Tensor] = repeat(inputs.s, len(b))
    b[:, 0] = inputs.k[:-1]
    b[:, 1] = inputs.k[1:].flip(0)
    if scan.gaps is not None:
        b.addcmul_(scan.gaps - 1, inputs.s, value=-1)
        falls = scan.gaps * inputs.s
        steps = falls.unbind(0)
    m[0].fill_(LOWEST)
    peaks = m.unbind(0)
    for t, (fall, key) in enumerate(zip(steps, b.unbind(0), strict=True)):
        torch.sub(peaks[t], fall, out=peaks[t + 1])
        torch.maximum(peaks[t + 1], key, out=peaks[t + 1])
    _exp(torch.sub(m[:-1], m[1:], out=a).sub_(falls))
    _exp(b.sub_(m[1:]))
    torch.mul(inputs.v[:-1], b[:, 0], out=h[1:, 0, 0])
    torch.mul(inputs.v[1:].flip(0), b[:, 1], out=h[1:, 0, 1])
    h[1:, 1] = b
    h[0].zero_()
    sums = h.unbind(0)
    for t, decay in enumerate(a.unbind(0)):
        if t > 0:  # there is nothing before the first step
            sums[t + 1].addcmul_(decay, sums[t])


def _weigh(inputs: _Inputs, scan: _Scan) -> _Mean:
    """Return the `_Mean` of the sums of both directions in `scan` and each token's own term.
    Turns `scan.m` into the module's c."""
    c, h = scan.m, scan.h
    r = torch.maximum(c[:, 0], c[:, 1].flip(0))
    torch.maximum(r, inputs.k + inputs.u, out=r)
    c[:, 0] -= r
    c[:, 1] -= r.flip(0)
    _exp(c)
    own = _exp(torch.sub(inputs.k, r, out=r).add_(inputs.u))  # k - r first: it is nearly exact
    sums = torch.mul(h[:, :, 1], c[:, None, 1], out=scan.g).flip(0)
    sums.addcmul_(h[:, :, 0], c[:, None, 0])
    inverse = sums[:, 1].add_(own).reciprocal_()
    return _Mean(own, inverse, sums[:, 0].addcmul_(own, inputs.v).mul_(inverse))


def _lend(memory: _Memory, inputs: _Inputs, count: int) -> _Scan:
    """Return a `_Scan` in the memory of `count` tensors [L, 2, R, C]: 8, or 6 for the forward pass,
    where G is not needed and shares the memory of h."""
    length, batch, channels = inputs.k.shape
    lent = memory.lend(count, length, 2, batch, channels)
    m, a, b, g = lent[:4].unbind(0)
    h, G = (x.view(length, 2, 2, batch, channels) for x in (lent[4:6], lent[-2:]))
    gaps = None
    if inputs.places is not None:
        gaps = inputs.places.diff(dim=0)
        gaps = torch.stack([gaps, gaps.flip(0)], dim=1)
    return _Scan(m, a[:-1], b[:-1], h, g, G, gaps)


def _both_ways(x: Tensor) -> Tensor:
    """Return x [L, R, C] as [L, 2, R, C]: in the order of time, and reversed."""
    return torch.stack([x, x.flip(0)], dim=1)


bidirectional_wkv_torch = make_operator(
    "bidirectional_wkv",
    _forward,
    _backward,
    empty=lambda k, v, *rest: empty_like(v),
    flops=flops,
    num_gradients=4,
)
