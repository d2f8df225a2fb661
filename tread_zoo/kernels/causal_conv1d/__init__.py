"""A depthwise causal convolution along the sequence, with SiLU if wanted.

Dimensions: B batch, L length, D channels, W taps.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.causal_conv1d.compiled_form import (
    CONVOLUTION_C,
    causal_conv1d_compiled,
)
from tread_zoo.kernels.causal_conv1d.compiled_form import unsuited as unsuited_compiled
from tread_zoo.kernels.causal_conv1d.fused import CONVOLUTION, causal_conv1d_fused, unsuited
from tread_zoo.kernels.causal_conv1d.naive import causal_conv1d_naive
from tread_zoo.kernels.causal_conv1d.torch_form import causal_conv1d_torch
from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Any, ...]:
    width, segments = heads * width, (torch.arange(length) // 9).expand(batch, -1)
    return normal(batch, length, width), normal(width, 4), normal(width), segments, True


def _with_silu(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `convolve` with one more argument, `silu`: whether to apply SiLU to the result."""

    def run_both(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        segment_ids: Tensor | None = None,
        silu: bool = False,
    ) -> Tensor:
        y = convolve(x, weight, bias, segment_ids)
        return F.silu(y) if silu else y

    return run_both


register(
    "causal_conv1d",
    [
        Implementation(
            "compiled",
            causal_conv1d_compiled,
            CONVOLUTION_C,
            unsuited_compiled,
            "for 8 taps at most, outside of torch.compile",
            fits_all=True,
        ),
        Implementation(
            "causal-conv1d",
            _with_silu(causal_conv1d_fused),
            CONVOLUTION,
            unsuited,
            "for 2 to 4 taps and channels in multiples of 8",
        ),
        Implementation("torch", _with_silu(causal_conv1d_torch)),
        Implementation("naive", _with_silu(causal_conv1d_naive)),
    ],
    _example,
    half=(0,),
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    segment_ids: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """Return y_t = bias + Σ_{s < W} weight[:, W-1-s] x_{t-s}, [B, L, D], in the dtype of x.

    Args:
        x: [B, L, D]; steps before the first count as zero.
        weight: [D, W], W taps for each channel; the last tap multiplies the present step.
        bias: [D] or None.
        segment_ids: integers [B, L]; a tap on a position with another id counts as zero.
        silu: whether to return SiLU of the sum.

    Raises:
        ValueError: for an empty input, or shapes that do not fit together.
    """
    check_shapes(
        x=(x, "B L D"), weight=(weight, "D W"), bias=(bias, "D"), segment_ids=(segment_ids, "B L")
    )
    return run("causal_conv1d", x, weight, bias, segment_ids, silu)
