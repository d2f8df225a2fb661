"""A depthwise causal convolution as W shifted multiply-adds.

    y_t = bias + Σ_{s < W} w_{W-1-s} x_{t-s}        s: how far a tap reaches back
    ∂x_t = Σ_s w_{W-1-s} ∂y_{t+s},   ∂w_{W-1-s} = Σ_{b,t} ∂y_t x_{t-s},   ∂bias = Σ_{b,t} ∂y_t

A tap into another segment is multiplied by zero. Sums are float32 (float64 for float64 inputs).
Dimensions: B batch, L length, D channels, W taps.
"""

from typing import Any

import torch
from torch import Tensor


def causal_conv1d_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Return the convolution; see `tread_zoo.kernels.causal_conv1d`."""
    return _CausalConv1d.apply(x, weight, bias, segment_ids)


class _CausalConv1d(torch.autograd.Function):
    """Keeps the inputs only, and adds all taps into one buffer."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, segment_ids)
        ctx.bias_dtype = None if bias is None else bias.dtype
        dtype = torch.promote_types(x.dtype, torch.float32)
        inputs, taps = x.to(dtype), weight.to(dtype).t().contiguous().flip(0)
        y = inputs * taps[0] if bias is None else torch.addcmul(bias.to(dtype), inputs, taps[0])
        for back in range(1, min(weight.shape[1], x.shape[1])):
            source = _inside(inputs[:, :-back], segment_ids, back)
            y[:, back:].addcmul_(source, taps[back])
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, weight, segment_ids = ctx.saved_tensors
        dtype = torch.promote_types(x.dtype, torch.float32)
        grad, inputs = grads[0].to(dtype), x.to(dtype)
        taps = weight.to(dtype).t().contiguous().flip(0)
        grad_x, grad_taps = grad * taps[0], torch.zeros_like(taps)
        grad_taps[0] = (grad * inputs).sum((0, 1))
        for back in range(1, min(weight.shape[1], x.shape[1])):
            sink = _inside(grad[:, back:], segment_ids, back)
            grad_x[:, :-back].addcmul_(sink, taps[back])
            grad_taps[back] = (sink * inputs[:, :-back]).sum((0, 1))
        grad_bias = None if ctx.bias_dtype is None else grad.sum((0, 1)).to(ctx.bias_dtype)
        return grad_x.to(x.dtype), grad_taps.flip(0).t().to(weight.dtype), grad_bias, None


def _inside(values: Tensor, segment_ids: Tensor | None, back: int) -> Tensor:
    """Zero what lies between positions of different segments, `back` apart."""
    if segment_ids is None:
        return values
    same = segment_ids[:, back:] == segment_ids[:, :-back]
    return values * same.unsqueeze(-1).to(values.dtype)
