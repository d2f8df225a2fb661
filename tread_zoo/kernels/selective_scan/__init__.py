"""The selective state-space scan of Mamba.

Dimensions: B batch, L length, D channels, N states, G groups.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, softplus
from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run
from tread_zoo.kernels.launch import TRITON
from tread_zoo.kernels.selective_scan.compiled_form import SCAN_C, selective_scan_compiled
from tread_zoo.kernels.selective_scan.fused import SCAN, selective_scan_fused
from tread_zoo.kernels.selective_scan.naive import selective_scan_naive
from tread_zoo.kernels.selective_scan.torch_form import selective_scan_torch
from tread_zoo.kernels.selective_scan.triton_form import MAX_STATES, selective_scan_triton


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Any, ...]:
    width, size = heads * width, 16
    u, delta = normal(batch, length, width), normal(batch, length, width)
    B, C = (normal(batch, length, heads, size) for _ in range(2))
    A = -torch.arange(1.0, size + 1).expand(width, -1)
    segments = (torch.arange(length) // 9).expand(batch, -1)
    return u, delta, A, B, C, torch.ones(width), normal(width), segments


def _step_sizes(delta: Tensor, bias: Tensor | None) -> Tensor:
    """Return Δ [B, L, D]: softplus(delta + bias), or delta without a bias."""
    if bias is None:
        return delta
    dtype = at_least_float32(delta, bias)
    return softplus(delta.to(dtype) + bias.to(dtype))


def _after_softplus(scan: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `scan` with one more argument, `step_bias`: if it is set, the step sizes are
    softplus(delta + step_bias), else delta."""

    def run_after(
        u: Tensor,
        delta: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        step_bias: Tensor | None,
        segment_ids: Tensor | None,
    ) -> Tensor:
        return scan(u, _step_sizes(delta, step_bias), A, B, C, D, segment_ids)

    return run_after


def _states_above(most: int) -> Callable[..., str | None]:
    """Return an `Implementation.unsuited` that refuses calls with more than `most` states."""

    def unsuited(u: Tensor, delta: Tensor, A: Tensor, *rest: object) -> str | None:
        return f"{A.shape[1]} states, more than {most}" if A.shape[1] > most else None

    return unsuited


register(
    "selective_scan",
    [
        Implementation("compiled", selective_scan_compiled, SCAN_C),
        Implementation(
            "triton",
            _after_softplus(selective_scan_triton),
            TRITON,
            _states_above(MAX_STATES),
            f"up to {MAX_STATES} states",
        ),
        # After our own kernel: this one needs transposed float32 copies of u and delta.
        Implementation(
            "mamba-ssm",
            _after_softplus(selective_scan_fused),
            SCAN,
            _states_above(256),
            "up to 256 states",
        ),
        Implementation("torch", _after_softplus(selective_scan_torch)),
        Implementation("naive", _after_softplus(selective_scan_naive)),
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
    step_bias: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    gaps: Tensor | None = None,
) -> Tensor:
    """Return y_t = C_t · h_t + D u_t with h_t = exp(g_t Δ_t A) h_{t-1} + Δ_t B_t u_t, h_{-1} = 0.

    (Mamba, arXiv 2312.00752, eqs. 2 and 4, with B discretised as Δ B.) Channel d belongs to group
    d // (D / G). Δ, A and the state are float32 at least, under autocast too.

    Args:
        u: inputs [B, L, D]; y has their dtype.
        delta: [B, L, D]; without `step_bias`, the step sizes Δ > 0.
        A: rates [D, N] of the N states of each channel, negative for decay.
        B, C: input and output vectors [B, L, G, N] of G groups, D divisible by G.
        D: factors on the input [D], or None.
        step_bias: [D]; Δ = softplus(delta + step_bias). None: Δ = delta.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.
        gaps: g > 0 [B, L], the number of steps of the full sequence from the previous token to this
            token; None means 1. The first gap of a row has no effect. Every form computes the
            scan of u / g with step sizes Δ g: the state decays over g steps, the input stays
            the same.

    Raises:
        ValueError: for an empty input, or shapes that do not fit together.
    """
    sizes = check_shapes(
        u=(u, "B L D"), delta=(delta, "B L D"), A=(A, "D N"), B=(B, "B L G N"), C=(C, "B L G N"),
        D=(D, "D"), step_bias=(step_bias, "D"), segment_ids=(segment_ids, "B L"),
        gaps=(gaps, "B L"),
    )  # fmt: skip
    if sizes["D"] % sizes["G"]:
        raise ValueError(f"u has {sizes['D']} channels, which {sizes['G']} groups do not divide.")
    if gaps is None:
        return run("selective_scan", u, delta, A, B, C, D, step_bias, segment_ids)
    dtype = at_least_float32(u, delta)
    x, steps = u.to(dtype), F.pad(gaps[:, 1:].to(dtype), (1, 0), value=1.0).unsqueeze(-1)
    delta = _step_sizes(delta, step_bias).to(dtype) * steps
    y = run("selective_scan", x / steps, delta, A, B, C, None, None, segment_ids)
    return (y if D is None else y + D.to(dtype) * x).to(u.dtype)
