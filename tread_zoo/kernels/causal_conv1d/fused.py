"""Adapter of the package causal-conv1d: a CUDA kernel for 2 to 4 taps."""

import torch
from torch import Tensor

from tread_zoo.kernels.packages import LibraryFunction

CONVOLUTION = LibraryFunction("causal_conv1d", "causal_conv1d_fn", "pip install kernels")


def causal_conv1d_fused(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Return the result of `causal_conv1d_fn`, whose layout is [B, D, L], channels contiguous."""
    return CONVOLUTION(
        x.contiguous().transpose(1, 2),
        weight,
        None if bias is None else bias.to(weight.dtype),
        seq_idx=None if segment_ids is None else segment_ids.to(torch.int32).contiguous(),
    ).transpose(1, 2)


def unsuited(x: Tensor, weight: Tensor, *rest: object) -> str | None:
    """Return why the package's kernel cannot take these arguments, or None if it can."""
    if not 2 <= weight.shape[1] <= 4:
        return f"{weight.shape[1]} taps, it takes 2 to 4"
    if x.shape[-1] % 8:
        return f"{x.shape[-1]} channels, not a multiple of 8"
    return None
