"""A depthwise causal convolution along the sequence.

Dimensions: B batch, L length, D channels, W taps.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.causal_conv1d.fused import (
    CONVOLUTION,
    causal_conv1d_fused,
    limits,
    unsuited,
)
from tread_zoo.kernels.causal_conv1d.naive import causal_conv1d_naive
from tread_zoo.kernels.causal_conv1d.torch_form import causal_conv1d_torch
from tread_zoo.kernels.dispatch import Implementation, choose, register


def _example(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((2, 70, 16), (16, 4), (16,))
    x, weight, bias = (torch.randn(size, generator=generator).to(device) for size in sizes)
    segments = (torch.arange(70, device=device) // 9).expand(2, -1).contiguous()
    return x, weight, bias, segments


register(
    "causal_conv1d",
    [
        Implementation("causal-conv1d", causal_conv1d_fused, CONVOLUTION, unsuited, limits),
        Implementation("torch", causal_conv1d_torch),
        Implementation("naive", causal_conv1d_naive),
    ],
    _example,
    half=(0,),
)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, segment_ids: Tensor | None = None
) -> Tensor:
    """Return y_t = bias + Σ_{s < W} weight[:, W-1-s] x_{t-s}, [B, L, D], in the dtype of x.

    Args:
        x: [B, L, D]; what lies before its start counts as zero.
        weight: [D, W], the last tap on the present.
        bias: [D] or None.
        segment_ids: integers [B, L]; taps into a position of another id count as zero.

    Raises:
        ValueError: for an empty input, or shapes that do not fit together.
    """
    if x.ndim != 3 or x.numel() == 0:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [B, L, D], none of them 0.")
    if weight.ndim != 2 or weight.shape[0] != x.shape[2] or weight.shape[1] == 0:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; for x of {x.shape[2]} channels it must be "
            f"[{x.shape[2]}, W], W at least 1."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be [{x.shape[2]}].")
    if segment_ids is not None and segment_ids.shape != x.shape[:2]:
        raise ValueError(
            f"segment_ids has shape {tuple(segment_ids.shape)}; it must be {tuple(x.shape[:2])}."
        )
    form = choose("causal_conv1d", x.device, x, weight, bias, segment_ids)
    return form.run(x, weight, bias, segment_ids)
