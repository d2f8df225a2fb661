"""h_t = exp(gaps_t Δ_t A) h_{t-1} + Δ_t x_t ⊗ B_t,   y_t = h_t C_t + D x_t, step by step.

Dimensions: B batch, L length, H heads, P width of a head, N states, G groups; head h is of group
h // (H / G).
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, reset


def ssd_naive(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
    gaps: Tensor | None = None,
) -> Tensor:
    """Return the scan by its formula; see `tread_zoo.kernels.ssd`.

    The loop runs over unbound views: an index into [B, L, H, P, N] under autograd would make the
    backward pass quadratic in L.
    """
    dtype = at_least_float32(x, delta)
    u, delta = x.to(dtype), delta.to(dtype)
    heads = x.shape[2] // B.shape[2]
    falls = delta * A.to(dtype)
    falls = falls if gaps is None else falls * gaps.to(dtype).unsqueeze(-1)
    decays = reset(falls, segment_ids).exp()
    inputs = (delta.unsqueeze(-1) * u).unsqueeze(-1)
    ins, outs = (v.to(dtype).repeat_interleave(heads, dim=2).unsqueeze(3) for v in (B, C))
    h = torch.zeros_like(inputs[:, 0] * ins[:, 0])
    ys = []
    steps = (v.unbind(1) for v in (decays[..., None, None], inputs, ins, outs))
    for decay, driven, b, c in zip(*steps, strict=True):
        h = decay * h + driven * b
        ys.append((h * c).sum(-1))
    y = torch.stack(ys, dim=1)
    return (y if D is None else y + D.to(dtype).unsqueeze(-1) * u).to(x.dtype)
