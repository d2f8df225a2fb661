"""The recurrences as most code writes them: a loop over unbound time steps under autograd.

They are what speed is measured against, and linear in the length in float64 too. An index into
[B, L, ...] inside the loop would make the backward pass quadratic.

Dimensions: B batch, L length, D or C channels, N states, G groups.
"""

import torch
from torch import Tensor


def selective_scan_loop(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return the selective scan; see `tread_zoo.kernels.selective_scan`. Steps are [B, G, N, D/G],
    the channels innermost."""
    batch, length, width = u.shape
    groups, size = B.shape[2:]
    shape = (batch, length, groups, 1, width // groups)
    now, step = (x.view(shape).transpose(0, 1) for x in (u, delta))
    decays = torch.exp(step * A.view(groups, -1, size).transpose(1, 2).contiguous())
    if segment_ids is not None:
        same = (segment_ids == segment_ids.roll(1, dims=1)).t()
        decays = decays * same[:, :, None, None, None].to(decays.dtype)
    inputs = step * now * B.transpose(0, 1).unsqueeze(-1)
    h, states = torch.zeros_like(inputs[0]), []
    for decay, driven in zip(decays.unbind(0), inputs.unbind(0), strict=True):
        h = torch.addcmul(driven, decay, h)
        states.append(h)
    y = (torch.stack(states) * C.transpose(0, 1).unsqueeze(-1)).sum(-2)
    y = y.transpose(0, 1).reshape(u.shape)
    return y if D is None else y + D * u


def bidirectional_wkv_loop(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return the WKV on a running maximum; see `tread_zoo.kernels.bidirectional_wkv`."""
    steps = list(zip(k.unbind(1), v.unbind(1), strict=True))
    slopes = _slopes(k, w, positions, length)
    ways = [_one_way(steps, slopes), _one_way(steps[::-1], slopes[::-1])[::-1]]
    outs = []
    for (key, value), before, after in zip(steps, *ways, strict=True):
        higher = torch.maximum(torch.maximum(before[2], after[2]), u + key)
        one, other, own = (torch.exp(x - higher) for x in (before[2], after[2], u + key))
        top = one * before[0] + other * after[0] + own * value
        outs.append(top / (one * before[1] + other * after[1] + own))
    return torch.stack(outs, dim=1)


def _slopes(
    k: Tensor, w: Tensor, positions: Tensor | None, length: int
) -> list[tuple[Tensor, Tensor]]:
    """Return, for each pair of neighbours, how far a sum decays and how far a token enters it."""
    slope = w / length
    if positions is None:
        return [(slope, torch.zeros_like(slope))] * (k.shape[1] - 1)
    gaps = positions.diff(dim=1).to(k.dtype).unsqueeze(-1).unbind(1)
    return [(gap * slope, (gap - 1) * slope) for gap in gaps]


def _one_way(
    steps: list[tuple[Tensor, Tensor]], slopes: list[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return (numerator, denominator, their log-scale) of all before each token."""
    top = bottom = torch.zeros_like(steps[0][0])
    peak = torch.full_like(top, -1e30)
    sums = [(top, bottom, peak)]
    for (key, value), (fall, entry) in zip(steps, slopes, strict=False):
        higher = torch.maximum(peak - fall, key - entry)
        old, new = torch.exp(peak - fall - higher), torch.exp(key - entry - higher)
        top, bottom, peak = old * top + new * value, old * bottom + new, higher
        sums.append((top, bottom, peak))
    return sums
