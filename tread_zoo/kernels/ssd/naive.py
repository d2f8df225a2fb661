"""h_t = exp(gaps_t Δ_t A) h_{t-1} + Δ_t x_t ⊗ B_t,   y_t = h_t C_t + D x_t, step by step.

Dimensions: B batch, L length, H heads, P width of a head, N states, G groups; head h is of group
h // (H / G).
"""

import torch
from torch import Tensor


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
    dtype = torch.promote_types(torch.promote_types(x.dtype, delta.dtype), torch.float32)
    u, delta = x.to(dtype), delta.to(dtype)
    heads = x.shape[2] // B.shape[2]
    rates = delta * A.to(dtype)
    decays = torch.exp(rates if gaps is None else rates * gaps.to(dtype).unsqueeze(-1))
    if segment_ids is not None:
        same = segment_ids == segment_ids.roll(1, dims=1)
        decays = decays * same.unsqueeze(-1).to(dtype)
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
