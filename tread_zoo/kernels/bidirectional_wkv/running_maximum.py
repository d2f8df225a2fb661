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

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from tread_zoo.kernels.bidirectional_wkv.inputs import Inputs, Memory, exp_

LOWEST = -1e30  # the log-weight of nothing; not -inf, whose differences are NaN


class _Scan(NamedTuple):
    """One pass over a block of rows.

    m, then c: [L, 2, R, C]. a, b: [L - 1, 2, R, C]. h: [L, 2 sums, 2, R, C]. For backward, G like h
    and g [L, 2 sums, R, C]. gaps: d_t in both directions, [L - 1, 2, R, 1]; None where every
    distance is 1.
    """

    m: Tensor
    a: Tensor
    b: Tensor
    h: Tensor
    g: Tensor
    G: Tensor
    gaps: Tensor | None


class _Mean(NamedTuple):
    """own: f, inverse: 1 / D, out: N / D, each [L, R, C]."""

    own: Tensor
    inverse: Tensor
    out: Tensor


def forward(inputs: Inputs, memory: Memory, out: Tensor) -> None:
    """Write the output to `out` [L, R, C]."""
    scan = _lend(memory, inputs, count=6)
    _run(inputs, scan)
    out.copy_(_weigh(inputs, scan).out)


def backward(
    inputs: Inputs, memory: Memory, grad: Tensor, gk: Tensor, gv: Tensor
) -> tuple[Tensor, Tensor]:
    """Write ∂k and ∂v to `gk` and `gv` [L, R, C] and return ∂s and ∂u [C], from `grad`."""
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


def _slope(inputs: Inputs, scan: _Scan, later: Tensor) -> Tensor:
    """Return ∂s [C] from G_{t+1} [L - 1, 2 sums, 2, R, C]; uses the memory of c."""
    q = torch.mul(scan.h[:-1, 0], later[:, 0], out=scan.m[1:])
    q.addcmul_(scan.h[:-1, 1], later[:, 1]).mul_(scan.a)
    if scan.gaps is not None:
        entered = _both_ways(inputs.v)[:-1].mul_(later[:, 0]).add_(later[:, 1]).mul_(scan.b)
        q.mul_(scan.gaps).addcmul_(entered, scan.gaps - 1)
    return -q.sum((0, 1, 2))


def _run(inputs: Inputs, scan: _Scan) -> None:
    """Run both directions: fill m, a, b and h."""
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
    exp_(torch.sub(m[:-1], m[1:], out=a).sub_(falls))
    exp_(b.sub_(m[1:]))
    torch.mul(inputs.v[:-1], b[:, 0], out=h[1:, 0, 0])
    torch.mul(inputs.v[1:].flip(0), b[:, 1], out=h[1:, 0, 1])
    h[1:, 1] = b
    h[0].zero_()
    sums = h.unbind(0)
    for t, decay in enumerate(a.unbind(0)):
        if t > 0:  # there is nothing before the first step
            sums[t + 1].addcmul_(decay, sums[t])


def _weigh(inputs: Inputs, scan: _Scan) -> _Mean:
    """Put the sums of both directions and the token's own term together; turns m into c."""
    c, h = scan.m, scan.h
    r = torch.maximum(c[:, 0], c[:, 1].flip(0))
    torch.maximum(r, inputs.k + inputs.u, out=r)
    c[:, 0] -= r
    c[:, 1] -= r.flip(0)
    exp_(c)
    own = exp_(torch.sub(inputs.k, r, out=r).add_(inputs.u))  # k - r first: it is nearly exact
    sums = torch.mul(h[:, :, 1], c[:, None, 1], out=scan.g).flip(0)
    sums.addcmul_(h[:, :, 0], c[:, None, 0])
    inverse = sums[:, 1].add_(own).reciprocal_()
    return _Mean(own, inverse, sums[:, 0].addcmul_(own, inputs.v).mul_(inverse))


def _lend(memory: Memory, inputs: Inputs, count: int) -> _Scan:
    """Return a scan in `count` tensors [L, 2, R, C]: 6 for the forward pass, which has no G."""
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
    """[L, R, C] -> [L, 2, R, C]: as it is, and last first."""
    return torch.stack([x, x.flip(0)], dim=1)
