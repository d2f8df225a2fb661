"""h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t,   y_t = C_t · h_t + D u_t, step by step.

Dimensions: B batch, L length, D channels, N states, G groups; channel d is of group d // (D / G).
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, reset


def selective_scan_naive(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return the scan by its formula; see `tread_zoo.kernels.selective_scan`.

    The loop runs over unbound views: an index into [B, L, D, N] under autograd would make the
    backward pass quadratic in L.
    """
    dtype = at_least_float32(u, delta)
    x, delta, A = u.to(dtype), delta.to(dtype), A.to(dtype)
    channels = u.shape[2] // B.shape[2]
    inputs = (delta * x).unsqueeze(-1) * B.to(dtype).repeat_interleave(channels, dim=2)
    decays = reset(delta.unsqueeze(-1) * A, segment_ids).exp()
    outputs = C.to(dtype).repeat_interleave(channels, dim=2)
    h = torch.zeros_like(inputs[:, 0])
    ys = []
    steps = zip(decays.unbind(1), inputs.unbind(1), outputs.unbind(1), strict=True)
    for decay, driven, output in steps:
        h = decay * h + driven
        ys.append((h * output).sum(-1))
    y = torch.stack(ys, dim=1)
    return (y if D is None else y + D.to(dtype) * x).to(u.dtype)
