"""The state-space dual of Mamba-2: a scan with one decay per head.

Dimensions: B batch, L length, H heads, P width of a head, N states, G groups.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run
from tread_zoo.kernels.ssd.fused import CHUNK_SCAN, CHUNK_SIMPLE_GLA, ssd_fla, ssd_mamba
from tread_zoo.kernels.ssd.naive import ssd_naive
from tread_zoo.kernels.ssd.torch_form import ssd_torch


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Tensor, ...]:
    x, delta = normal(batch, length, heads, width), F.softplus(normal(batch, length, heads) - 2)
    B, C = (normal(batch, length, 1, width) for _ in range(2))
    A, D = -torch.linspace(1, 8, heads), torch.ones(heads)
    places = torch.arange(length).expand(batch, -1)
    return x, delta, A, B, C, D, places // 9 % 3, 1 + places % 3


register(
    "ssd",
    [
        Implementation("mamba-ssm", ssd_mamba, CHUNK_SCAN, tf32=True),
        # This form copies B and C from each group to its heads.
        Implementation("fla", ssd_fla, CHUNK_SIMPLE_GLA, tf32=True),
        Implementation("torch", ssd_torch),
        Implementation("naive", ssd_naive),
    ],
    _example,
    half=(0, 3, 4),
)


def ssd(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    gaps: Tensor | None = None,
) -> Tensor:
    """Return y_t = h_t C_t + D x_t with h_t = exp(gaps_t Δ_t A) h_{t-1} + Δ_t x_t ⊗ B_t.

    (Mamba-2, arXiv 2405.21060, section 5.1.) Every head has a state [P, N] (width of a head, number
    of states), zero before the first step; head h belongs to group h // (H / G). Δ, A, the sums of
    decays and the states are float32 at least, under autocast too.

    Args:
        x: inputs [B, L, H, P]; y has their shape and dtype.
        delta: step sizes Δ > 0 [B, L, H], after the softplus.
        A: rates [H], negative.
        B, C: input and output vectors [B, L, G, N] of G groups, H divisible by G.
        D: factors on the input [H], or None.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.
        gaps: number of steps of the full sequence from the previous token to this token, positive
            [B, L]; the state decays over that many steps of the token's Δ. None means 1. Gaps
            get no gradient.

    Raises:
        ValueError: for an empty input, shapes that do not fit together, or gaps that are not
            positive (checked on the CPU only) or require a gradient.
    """
    sizes = check_shapes(
        x=(x, "B L H P"), delta=(delta, "B L H"), A=(A, "H"), B=(B, "B L G N"), C=(C, "B L G N"),
        D=(D, "H"), segment_ids=(segment_ids, "B L"), gaps=(gaps, "B L"),
    )  # fmt: skip
    if sizes["H"] % sizes["G"]:
        raise ValueError(f"x has {sizes['H']} heads, which {sizes['G']} groups do not divide.")
    if gaps is not None:
        _check_gaps(gaps)
    return run("ssd", x, delta, A, B, C, D, segment_ids, gaps)


def _check_gaps(gaps: Tensor) -> None:
    if gaps.requires_grad:
        raise ValueError("gaps require a gradient, which no form gives; detach them.")
    if gaps.device.type != "cpu" or torch.compiler.is_compiling():
        return  # reading the gaps would wait for the device, or break the graph
    if bool((gaps <= 0).any()):
        raise ValueError("gaps must be positive: 1 where the token before is the one ahead of it.")
