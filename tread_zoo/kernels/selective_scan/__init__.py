"""The selective state-space scan of Mamba.

Dimensions: B batch, L length, D channels, N states, G groups.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, choose, register
from tread_zoo.kernels.launch import TRITON
from tread_zoo.kernels.selective_scan import fused, triton_form
from tread_zoo.kernels.selective_scan.fused import selective_scan_fused
from tread_zoo.kernels.selective_scan.gaps import scan_with_gaps
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.selective_scan.torch_form import selective_scan_torch
from tread_zoo.kernels.selective_scan.triton_form import selective_scan_triton


def _example(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    batch, length, width, groups, size = 2, 70, 24, 2, 8
    u, delta = (torch.randn(batch, length, width, generator=generator) for _ in range(2))
    B, C = (torch.randn(batch, length, groups, size, generator=generator) for _ in range(2))
    A, D = -torch.arange(1.0, size + 1).expand(width, -1), torch.ones(width)
    tensors = (u, torch.nn.functional.softplus(delta), A.contiguous(), B, C, D)
    segments = (torch.arange(length) // 9).expand(batch, -1).contiguous()
    return tuple(x.to(device) for x in (*tensors, segments))


register(
    "selective_scan",
    [
        Implementation(
            "triton", selective_scan_triton, TRITON, triton_form.unsuited, triton_form.limits
        ),
        # After ours: it is given float32 copies of u and delta, transposed.
        Implementation("mamba-ssm", selective_scan_fused, fused.SCAN, fused.unsuited, fused.limits),
        Implementation("torch", selective_scan_torch),
        Implementation("naive", selective_scan_naive),
    ],
    _example,
    half=(0, 3, 4),
)


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    gaps: Tensor | None = None,
) -> Tensor:
    """Return y_t = C_t · h_t + D u_t with h_t = exp(g_t Δ_t A) h_{t-1} + Δ_t B_t u_t, h_{-1} = 0.

    (Mamba, arXiv 2312.00752, eqs. 2 and 4, with B discretised as Δ B.) Channel d belongs to group
    d // (D / G). Δ, A and the state are float32 at least, under autocast too.

    Args:
        u: inputs [B, L, D]; y has their dtype.
        delta: step sizes Δ > 0 [B, L, D], after the softplus.
        A: rates [D, N], negative for decay.
        B, C: input and output vectors [B, L, G, N], D divisible by G.
        D: [D] or None.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.
        gaps: g > 0 [B, L], the number of steps of the full sequence from the token before to this
            one; None means 1. The first of a row has no effect. Every form takes it, as the scan of
            u / g with step sizes Δ g: the decay is that of g steps, what a token adds the same.

    Raises:
        ValueError: for an empty input, or shapes that do not fit together.
    """
    _check(u, delta, A, B, C, D, segment_ids, gaps)
    if gaps is not None:
        return scan_with_gaps(
            lambda *args: selective_scan(*args, segment_ids=segment_ids),
            *(u, delta, A, B, C, D, gaps),
        )
    args = (u, delta, A, B, C, D, segment_ids)
    return choose("selective_scan", u.device, *args).run(*args)


def _check(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
    gaps: Tensor | None,
) -> None:
    if u.ndim != 3 or u.numel() == 0:
        raise ValueError(f"u has shape {tuple(u.shape)}; it must be [B, L, D], none of them 0.")
    batch, length, width = u.shape
    if A.ndim != 2 or A.shape[0] != width or A.shape[1] == 0:
        raise ValueError(f"A has shape {tuple(A.shape)}; it must be [{width}, N], N at least 1.")
    groups = B.shape[2] if B.ndim == 4 else 0
    if groups == 0 or width % groups:
        raise ValueError(
            f"B has shape {tuple(B.shape)}; it must be [B, L, G, N], G a divisor of {width}."
        )
    vectors = (batch, length, groups, A.shape[1])
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "delta": (delta, (batch, length, width)),
        "B": (B, vectors),
        "C": (C, vectors),
        "D": (D, (width,)),
        "segment_ids": (segment_ids, (batch, length)),
        "gaps": (gaps, (batch, length)),
    }
    for name, (value, shape) in wanted.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}.")
    if segment_ids is not None and (segment_ids.is_floating_point() or segment_ids.is_complex()):
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}; it must be of integers.")
    if gaps is not None and (gaps.is_complex() or gaps.dtype == torch.bool):
        raise ValueError(f"gaps has dtype {gaps.dtype}; it must be of integers or floating-point.")
