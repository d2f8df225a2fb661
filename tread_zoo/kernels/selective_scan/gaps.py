"""Decay over gaps, by any form of the scan.

    h_t = exp(g_t Δ_t A) h_{t-1} + Δ_t B_t u_t

is the scan of u / g with step sizes Δ g: the decay becomes that of g_t steps, and what the token
adds stays (Δ g) B (u / g) = Δ B u. D u is added outside. g_0 decays nothing and is taken as 1.

Dimensions: B batch, L length, D channels, N states, G groups.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def scan_with_gaps(
    scan: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor],
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    gaps: Tensor,
) -> Tensor:
    """Return y [B, L, D] in the dtype of u.

    Args:
        scan: (u, delta, A, B, C) -> y without D u. It gets u and delta in float32 at least.
        u, delta, A, B, C, D: as in `tread_zoo.kernels.selective_scan`.
        gaps: g > 0 [B, L].
    """
    dtype = torch.promote_types(torch.promote_types(u.dtype, delta.dtype), torch.float32)
    x = u.to(dtype)
    steps = F.pad(gaps[:, 1:].to(dtype), (1, 0), value=1.0).unsqueeze(-1)
    y = scan(x / steps, delta.to(dtype) * steps, A, B, C)
    return (y if D is None else y + D.to(dtype) * x).to(u.dtype)
