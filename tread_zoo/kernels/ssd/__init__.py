"""The state-space dual of Mamba-2: a scan whose decay is one number a head.

Dimensions: B batch, L length, H heads, P width of a head, N states, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, choose, register
from tread_zoo.kernels.ssd.fused import (
    CHUNK_SCAN,
    CHUNK_SIMPLE_GLA,
    limits,
    ssd_fla,
    ssd_mamba,
    unsuited,
)
from tread_zoo.kernels.ssd.naive import ssd_naive
from tread_zoo.kernels.ssd.torch_form import ssd_torch


def _example(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, width, groups, size = 2, 70, 4, 32, 2, 16
    x = torch.randn(batch, length, heads, width, generator=generator)
    delta = F.softplus(torch.randn(batch, length, heads, generator=generator) - 2)
    B, C = (torch.randn(batch, length, groups, size, generator=generator) for _ in range(2))
    A, D = -torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.ones(heads)
    segments = (torch.arange(length) // 9 % 3).expand(batch, -1).contiguous()
    gaps = torch.randint(1, 4, (batch, length), generator=generator)
    return tuple(v.to(device) for v in (x, delta, A, B, C, D, segments, gaps))


register(
    "ssd",
    [
        Implementation("mamba-ssm", ssd_mamba, CHUNK_SCAN, unsuited, limits, tf32=True),
        # It has B and C for each head instead of each group, as copies.
        Implementation("fla", ssd_fla, CHUNK_SIMPLE_GLA, unsuited, limits, tf32=True),
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

    (Mamba-2, arXiv 2405.21060, section 5.1.) Every head has a state [P, N], zero before the first
    step; head h belongs to group h // (H / G). Δ, A, the sums of decays and the states are float32
    at least, under autocast too.

    Args:
        x: inputs [B, L, H, P]; y has their shape and dtype.
        delta: step sizes Δ > 0 [B, L, H], after the softplus.
        A: rates [H], negative.
        B, C: input and output vectors [B, L, G, N], H divisible by G.
        D: [H] or None.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.
        gaps: how many steps of the full sequence a token comes after the one before it, positive
            [B, L]; the state decays for as many, by Δ of the token. None means 1 everywhere. They
            get no gradient.

    Raises:
        ValueError: for an empty input, shapes that do not fit together, or gaps that are not
            positive (looked at on the CPU only) or ask for a gradient.
    """
    _check(x, delta, A, B, C, D, segment_ids, gaps)
    args = (x, delta, A, B, C, D, segment_ids, gaps)
    return choose("ssd", x.device, *args).run(*args)


def _check(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
    gaps: Tensor | None,
) -> None:
    if x.ndim != 4 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [B, L, H, P], none of them 0.")
    batch, length, heads, _ = x.shape
    groups, size = B.shape[2:] if B.ndim == 4 else (0, 0)
    if groups == 0 or size == 0 or heads % groups:
        raise ValueError(
            f"B has shape {tuple(B.shape)}; it must be [B, L, G, N], G a divisor of {heads} and N "
            "at least 1."
        )
    vectors = (batch, length, groups, size)
    wanted: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "delta": (delta, (batch, length, heads)),
        "A": (A, (heads,)),
        "B": (B, vectors),
        "C": (C, vectors),
        "D": (D, (heads,)),
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
    if gaps is not None:
        _check_gaps(gaps)


def _check_gaps(gaps: Tensor) -> None:
    if gaps.requires_grad:
        raise ValueError("gaps require a gradient, which no form gives; detach them.")
    if gaps.device.type != "cpu" or torch.compiler.is_compiling():
        return  # to read them would wait for the device, or break the graph
    if bool((gaps <= 0).any()):
        raise ValueError("gaps must be positive: 1 where the token before is the one ahead of it.")
