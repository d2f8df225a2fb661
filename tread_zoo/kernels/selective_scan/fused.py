"""Adapter of mamba-ssm's CUDA selective scan, which keeps the state in registers."""

import importlib

import torch
from torch import Tensor

MODULE = "mamba_ssm.ops.selective_scan_interface"
INSTALL = "pip install mamba-ssm --no-build-isolation"


def selective_scan_fused(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return `selective_scan_fn`, which takes u, Δ [B, D, L] and B, C [B, G, N, L], all float32."""
    function = importlib.import_module(MODULE).selective_scan_fn
    y = function(
        u.float().transpose(1, 2).contiguous(),
        delta.float().transpose(1, 2).contiguous(),
        A.float().contiguous(),
        B.float().permute(0, 2, 3, 1).contiguous(),
        C.float().permute(0, 2, 3, 1).contiguous(),
        None if D is None else D.float().contiguous(),
    )
    return y.transpose(1, 2).to(u.dtype)


def unsuited(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    segment_ids: Tensor | None,
) -> str | None:
    """Return why the kernel does not take this call, or None."""
    if segment_ids is not None:
        return "segment_ids"
    if A.shape[1] > 256:
        return f"{A.shape[1]} states, more than 256"
    if torch.float64 in (u.dtype, delta.dtype):
        return "float64"
    return None


def limits(device: torch.device) -> str | None:
    """Return the rule of `unsuited` in words."""
    return "without segment_ids, up to 256 states"
