"""A depthwise causal convolution as W shifted multiply-adds.

    y_t = bias + Σ_{s < W} w_{W-1-s} x_{t-s}        s: how far a tap reaches back
    ∂x_t = Σ_s w_{W-1-s} ∂y_{t+s},   ∂w_{W-1-s} = Σ_{b,t} ∂y_t x_{t-s},   ∂bias = Σ_{b,t} ∂y_t

A tap into another segment is multiplied by zero. Sums are float32 (float64 for float64 inputs).
Dimensions: B batch, L length, D channels, W taps.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32
from tread_zoo.kernels.operators import empty_like, make_operator


def causal_conv1d_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, segment_ids: Tensor | None = None
) -> Tensor:
    """Return the convolution; see `tread_zoo.kernels.causal_conv1d`."""
    # While compiling: a custom operator could not be fused.
    run = _Fusible.apply if torch.compiler.is_compiling() else _operator
    return run(x, weight, bias, segment_ids)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None) -> Tensor:
    """Return the output y [B, L, D]; all taps are added into one buffer."""
    dtype = at_least_float32(x)
    inputs, taps = x.to(dtype), weight.to(dtype).t().contiguous().flip(0)
    y = inputs * taps[0] if bias is None else torch.addcmul(bias.to(dtype), inputs, taps[0])
    for back in range(1, min(weight.shape[1], x.shape[1])):
        source = _inside(inputs[:, :-back], segment_ids, back)
        y[:, back:].addcmul_(source, taps[back])
    return y.to(x.dtype)


def _gradients(
    grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; the last is empty if `bias` is None."""
    dtype = at_least_float32(x)
    grad, inputs = grad_y.to(dtype), x.to(dtype)
    taps = weight.to(dtype).t().contiguous().flip(0)
    grad_x, grad_taps = grad * taps[0], torch.zeros_like(taps)
    grad_taps[0] = (grad * inputs).sum((0, 1))
    for back in range(1, min(weight.shape[1], x.shape[1])):
        sink = _inside(grad[:, back:], segment_ids, back)
        grad_x[:, :-back].addcmul_(sink, taps[back])
        grad_taps[back] = (sink * inputs[:, :-back]).sum((0, 1))
    grad_bias = x.new_empty(0) if bias is None else grad.sum((0, 1)).to(bias.dtype)
    return grad_x.to(x.dtype), grad_taps.flip(0).t().to(weight.dtype).contiguous(), grad_bias


class _Fusible(torch.autograd.Function):
    """The convolution as an autograd function, which torch.compile can trace and fuse."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, segment_ids)
        # torch 2.11 compiles the gradients of a returned tensor that was changed in place to zeros.
        return _convolve(x, weight, bias, segment_ids).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = _gradients(grads[0], *saved)
        return grad_x, grad_weight, None if saved[2] is None else grad_bias, None


def flops(x: tuple[int, ...], weight: tuple[int, ...], *args: Any) -> tuple[int, int]:
    """Return the FLOPs: 2 B L D W forward for W taps (as in torch, products with zeros before the
    start count), and twice as many backward, for ∂x and ∂w."""
    return 2 * math.prod(x) * weight[1], 4 * math.prod(x) * weight[1]


def _inside(values: Tensor, segment_ids: Tensor | None, back: int) -> Tensor:
    """Return `values` [B, L - back, D], with 0 at t where the steps t and t + back have different
    segment ids."""
    if segment_ids is None:
        return values
    same = segment_ids[:, back:] == segment_ids[:, :-back]
    return values * same.unsqueeze(-1).to(values.dtype)


_operator = make_operator(
    "causal_conv1d",
    _convolve,
    _gradients,
    empty=lambda x, *rest: empty_like(x),
    flops=flops,
    num_gradients=3,
)
