"""The bidirectional WKV on one maximum a channel: two linear scans, twice in the backward pass.

With M = max_t k_t of a row and channel, x_t = exp(k_t - M) (v_t, 1), s = w/T, d_t the distance from
step t to the next, and P_t, S_t the sums over what lies before and after t,

    P_t = Σ_{i<t} exp(-(p_t - p_i - 1) s) x_i,     S_t the same over i > t
    (N_t, D_t) = y_t = P_t + S_t + e^u x_t,        out_t = N_t / D_t

That is y = K x with K symmetric, so the gradient of x is K applied to that of y:

    g_t = (1, -out_t) ∂out_t / D_t,   h = K g = P' + S' + e^u g,   (∂v_t, z_t) = exp(k_t - M) h_t
    ∂k_t = v_t ∂v_t + z_t,            ∂u = e^u Σ x_t · g_t
    -∂s = Σ P_t · (d_{t-1} e^-s S'_t + (d_{t-1} - 1) g_t) + S_t · (d_t e^-s P'_t + (d_t - 1) g_t)

(The distance of a pair is the sum of the gaps between, so ∂s adds up what passes over each gap: a
sum that arrives at t, times one that goes on from there or g_t itself.)

Where this may run: let the spread of a row and channel be max k - min k + |u| + max(-w, 0), and at
most 40. Then exp(k_t - M) lies in [e^-40, 1], and e^u and the growth under a negative w, alone and
together with it, within e^±40; all are normal float32 numbers. All terms of D_t are positive, so it
has the relative accuracy of its terms. It is at least its own term, e^-40 = 4e-18: what long decays
let vanish from the other sums, below 1e-38, is nothing to it. N_t is exact relative to the sum of
its terms' sizes, which D_t max|v| bounds: the accuracy of a mean. 1/D_t is at most 2e17, and h_t at
most L e^40 max |∂out| (1, |out|): that overflows only where L max |∂out| (1, |out|) passes 1e21.
The factor exp(k_t - M) brings it back: x_t · h_t, and so each product P · S' too, is a sum of
gradients times weights below 1. D_t is at most (L + 1) e^40, so that g_t stays a normal number for
gradients down to 1e-18.

A scan goes in chunks of Q steps. h_q = x_q + exp(-d s) h_{q-1} runs within all chunks at once; then
the chunks' ends go on from one chunk to the next; then each step receives its share of the end
before it. That is Q + L/Q calls in place of L, and each sum goes through as few roundings.

Dimensions: B batch, L length, C channels, R rows of the batch done at a time, n chunks of Q steps.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.bidirectional_wkv.inputs import LOG2_E, Inputs, Memory, exp_

CHUNK = 16  # steps of a chunk at most: Q + L/Q is least about √L
SPREAD = 40.0


class _Decays(NamedTuple):
    """exp(-distance s), shaped to go with sums [n, Q, 2, R, C].

    links: from a step to the next of its chunk [n, Q - 1, 1, R, C]; ends: from the end of the
    chunk before [n - 1, Q, 1, R, C]; starts: from the start of the chunk after, alike. Without
    places, n and R are 1. gaps: d, with a 1 before the first and after the last step,
    [L + 1, 1, R, 1], and near: exp(-(d - 1) s) [L + 1, 1, R, C]; None without places.
    """

    links: Tensor
    ends: Tensor
    starts: Tensor
    gaps: Tensor | None
    near: Tensor | None


class _Sums(NamedTuple):
    """before: P, after: S, total: y, each [L, 2, R, C]."""

    before: Tensor
    after: Tensor
    total: Tensor


def largest_key(inputs: Inputs) -> Tensor | None:
    """Return M [R, C], or None where this form may not run: the spread is above `SPREAD` or NaN,
    or the inputs are not on the CPU, where to look at them would wait for the device."""
    if inputs.k.device.type != "cpu":
        return None
    top = inputs.k.amax(0)
    spread = (top - inputs.k.amin(0)).add_(inputs.u.abs())
    spread += (inputs.s * -inputs.length).clamp_min_(0)
    return top if bool((spread <= SPREAD).all()) else None


def forward(inputs: Inputs, top: Tensor, memory: Memory, out: Tensor) -> None:
    """Write the output to `out` [L, R, C], where `top` is the `largest_key`."""
    x, *room = _lend(memory, inputs.k.shape, count=4)
    x = x[1:-1]
    _weigh(inputs, top, x)
    y = _apply(inputs, _decays(inputs), x, room).total
    torch.div(y[:, 0], y[:, 1], out=out)


def backward(
    inputs: Inputs, top: Tensor, memory: Memory, grad: Tensor, gk: Tensor, gv: Tensor
) -> tuple[Tensor, Tensor]:
    """Write ∂k and ∂v to `gk` and `gv` [L, R, C] and return ∂s and ∂u [C], from `grad`."""
    length, decays = len(inputs.k), _decays(inputs)
    x, g, total, *room = _lend(memory, inputs.k.shape, count=7)
    x, g = x[1:-1], g[1:-1]
    _weigh(inputs, top, x)
    sums = _apply(inputs, decays, x, [*room[:2], total])
    out, weight = sums.total.unbind(1)
    out.div_(weight)
    torch.div(grad, weight, out=g[:length, 0])
    torch.mul(g[:length, 0], out, out=g[:length, 1]).neg_()
    g[length:].zero_()
    grad_sums = _apply(inputs, decays, g, [*room[2:], total])
    x, g = x[:length], g[:length]
    value, key = grad_sums.total.mul_(x[:, 1:]).unbind(1)
    gv.copy_(value)
    torch.addcmul(key, inputs.v, value, out=gk)
    slope = _slope(inputs, decays, sums, grad_sums, g)
    return slope, g.mul_(x).sum((0, 1, 2)).mul_(inputs.u.exp())


def _slope(inputs: Inputs, decays: _Decays, sums: _Sums, grad_sums: _Sums, g: Tensor) -> Tensor:
    """Return ∂s [C]; uses the memory of the sums."""
    before, after, _ = sums
    jumps = torch.zeros_like(inputs.s)
    if decays.gaps is not None:
        here, there = decays.gaps[:-1], decays.gaps[1:]
        apart = torch.mul(before, here - 1, out=grad_sums.total).addcmul_(after, there - 1)
        jumps = apart.mul_(g).sum((0, 1, 2))
        before.mul_(here)
        after.mul_(there)
    passing = before.mul_(grad_sums.after).addcmul_(after, grad_sums.before)
    return -(passing.sum((0, 1, 2)).mul_(torch.exp(-inputs.s)) + jumps)


def _weigh(inputs: Inputs, top: Tensor, x: Tensor) -> None:
    """Write exp(k - M) (v, 1) to x [n Q, 2, R, C], and zeros after the last step."""
    length = len(inputs.k)
    weights = exp_(torch.sub(inputs.k, top, out=x[:length, 1]))
    torch.mul(weights, inputs.v, out=x[:length, 0])
    x[length:].zero_()


def _apply(inputs: Inputs, decays: _Decays, x: Tensor, room: Sequence[Tensor]) -> _Sums:
    """Return K x and its parts, in three tensors [n Q + 2, 2, R, C]; x [n Q, 2, R, C] is kept."""
    before, after, total = room
    length, size = len(inputs.k), _chunks(len(inputs.k))
    before[0].zero_()
    after[-1].zero_()
    chunks = [t.view(*size, *t.shape[1:]) for t in (x, before[1:-1], after[1:-1])]
    _scan(chunks[0], chunks[1], chunks[2], decays)
    sums = _Sums(before[:length], after[2 : length + 2], total[:length])
    if decays.near is not None:
        sums.before.mul_(decays.near[:-1])
        sums.after.mul_(decays.near[1:])
    torch.add(sums.before, sums.after, out=sums.total).addcmul_(x[:length], inputs.u.exp())
    return sums


def _scan(x: Tensor, past: Tensor, coming: Tensor, decays: _Decays) -> None:
    """Write the sums up to and from each step on, itself included, of x [n, Q, 2, R, C]."""
    steps, links = x.unbind(1), decays.links.unbind(1)
    _walk(steps, past.unbind(1), links)
    _walk(steps[::-1], coming.unbind(1)[::-1], links[::-1])
    if len(x) == 1:
        return
    ends, starts = (t.expand(len(x) - 1, *t.shape[1:]) for t in (decays.ends, decays.starts))
    tails, heads = past[:, -1].unbind(0), coming[:, 0].unbind(0)[::-1]
    _walk(tails, tails, ends[:, -1].unbind(0))
    _walk(heads, heads, starts[:, 0].unbind(0)[::-1])
    past[1:, :-1].addcmul_(ends[:, :-1], past[:-1, -1:])
    coming[:-1, 1:].addcmul_(starts[:, 1:], coming[1:, :1])


def _walk(steps: Sequence[Tensor], sums: Sequence[Tensor], links: Sequence[Tensor]) -> None:
    """sums_t = steps_t + links_{t-1} sums_{t-1}; both may be the same tensors."""
    sums[0].copy_(steps[0])
    for t, link in enumerate(links, start=1):
        torch.addcmul(steps[t], link, sums[t - 1], out=sums[t])


def _decays(inputs: Inputs) -> _Decays:
    num_chunks, chunk = _chunks(len(inputs.k))
    if inputs.places is None:
        distances = torch.arange(1, chunk + 1, dtype=inputs.s.dtype).view(1, chunk, 1, 1, 1)
        link = _decay(distances[:, :1], inputs.s).expand(-1, chunk - 1, -1, -1, -1)
        ends, starts = (_decay(x, inputs.s) for x in (distances, distances.flip(1)))
        return _Decays(link, ends, starts, None, None)
    places = inputs.places.unsqueeze(1)
    fill = places[-1:].expand(num_chunks * chunk - len(places), -1, -1, -1)
    steps = torch.cat([places, fill]).view(num_chunks, chunk, *places.shape[1:])
    links = _decay(steps.diff(dim=1), inputs.s)
    ends = _decay(steps[1:] - steps[:-1, -1:], inputs.s)
    starts = _decay(steps[1:, :1] - steps[:-1], inputs.s)
    gaps = F.pad(places.diff(dim=0), (0, 0, 0, 0, 0, 0, 1, 1), value=1.0)
    return _Decays(links, ends, starts, gaps, _decay(gaps - 1, inputs.s))


def _decay(distances: Tensor, s: Tensor) -> Tensor:
    """Return exp(-distances s), [..., 1] and [C] -> [..., C].

    The memory is filled up to whole vectors: torch computes the rest of one by another function,
    and the positions 0 … L-1 have to give what None gives, to the bit.
    """
    size = distances.numel() * s.numel()
    memory = s.new_zeros(size + -size % 64)
    decays = memory[:size].view(*distances.shape[:-1], s.numel())
    torch.mul(distances, s * -LOG2_E, out=decays)
    memory.exp2_()
    return decays


def _chunks(length: int) -> tuple[int, int]:
    """Return n and Q for a length L: n Q is L, or a little more."""
    num_chunks = -(-length // CHUNK)
    return num_chunks, -(-length // num_chunks)


def _lend(memory: Memory, shape: torch.Size, count: int) -> Sequence[Tensor]:
    """Return `count` tensors [n Q + 2, 2, R, C] for k of `shape`: a step more at both ends."""
    length, rows, channels = shape
    num_chunks, chunk = _chunks(length)
    return memory.lend(count, num_chunks * chunk + 2, 2, rows, channels).unbind(0)
