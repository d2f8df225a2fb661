"""Adapter of mamba-ssm's CUDA selective scan, which keeps the state in registers.

The kernel has no segments. The first token of a segment gets a step R so long that the state decays
to nothing, exp(R A) <= 4e-18, and the input Δ u / R, so that it adds R B (Δ u / R) = Δ B u as
before. R is no longer than necessary, and a constant to autograd: the kernel's backward pass
computes exp(Δ A) h_{t-1} as h_t - Δ B u and multiplies its rounding error by the step. R = 1e20
would make ∂A and ∂Δ 1e11 times too large.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import segment_starts
from tread_zoo.kernels.packages import LibraryFunction

SCAN = LibraryFunction(
    "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", "pip install kernels"
)

FORGOTTEN = 40.0  # lower bound of R |A|; exp(-40) is 4e-18, far below the rounding of float32


def selective_scan_fused(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return the scan; see `tread_zoo.kernels.selective_scan`. Segments need A < 0."""
    if segment_ids is None:
        return _scan(u, delta, A, B, C, D)
    x = u.float()
    y = _scan(*restart(x, delta.float(), A, segment_ids), A, B, C)
    return (y if D is None else y + D.float() * x).to(u.dtype)


def restart(u: Tensor, delta: Tensor, A: Tensor, segment_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return u and Δ [B, L, D] with which a scan without segments equals the scan with segments.

    Args:
        u, delta: float32 [B, L, D].
        A: [D, N], below 0.
        segment_ids: [B, L].
    """
    long = FORGOTTEN / A.detach().float().abs().amin(dim=1)
    begins = segment_starts(segment_ids).unsqueeze(-1)
    return torch.where(begins, delta * u / long, u), torch.where(begins, long, delta)


def _scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None
) -> Tensor:
    """Return the result of `selective_scan_fn` for u, Δ [B, D, L] and B, C [B, G, N, L], all
    float32."""
    return (
        SCAN(
            u.float().transpose(1, 2).contiguous(),
            delta.float().transpose(1, 2).contiguous(),
            A.float().contiguous(),
            B.float().permute(0, 2, 3, 1).contiguous(),
            C.float().permute(0, 2, 3, 1).contiguous(),
            None if D is None else D.float().contiguous(),
        )
        .transpose(1, 2)
        .to(u.dtype)
    )
