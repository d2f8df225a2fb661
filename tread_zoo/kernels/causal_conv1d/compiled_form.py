"""The causal convolution with SiLU in C for a CPU, in one pass; autograd keeps only the inputs.

Rows of the batch and blocks of channels are independent of each other, so the number of threads
changes no bit; the gradients of weights and biases are summed over the rows afterwards.

Dimensions: B batch, L length, D channels, W taps.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.causal_conv1d.torch_form import flops
from tread_zoo.kernels.compiled import CompiledSource
from tread_zoo.kernels.operators import empty_like, make_operator

CHANNELS, MOST_TAPS = 64, 8  # as in convolution.c
CONVOLUTION_C = CompiledSource(Path(__file__).with_name("convolution.c"))


def unsuited(x: Tensor, weight: Tensor, *args: object) -> str | None:
    """Return why the C form cannot or should not take these arguments, or None."""
    if weight.shape[1] > MOST_TAPS:
        return f"more than {MOST_TAPS} taps"
    return "torch.compile fuses the torch form" if torch.compiler.is_compiling() else None


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor | None, silu: bool
) -> Tensor:
    """Return the output y [B, L, D]."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    _run(x, weight, bias, segment_ids, silu, y, *[None] * 4)
    return y.to(x.dtype)


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segment_ids: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; the last is empty if `bias` is None."""
    (batch, _, width), taps = x.shape, weight.shape[1]
    gx = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    gw, gbias = gx.new_empty(batch, taps, width), gx.new_empty(batch, width)
    given = grad.float().contiguous()
    _run(x, weight, bias, segment_ids, silu, None, given, gx, gw, gbias)
    return (
        gx.to(x.dtype),
        gw.sum(0).flip(0).t().to(weight.dtype).contiguous(),
        x.new_empty(0) if bias is None else gbias.sum(0).to(bias.dtype),
    )


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segment_ids: Tensor | None,
    silu: bool,
    *memory: Tensor | None,
) -> None:
    (batch, length, width), taps = x.shape, weight.shape[1]
    if taps > MOST_TAPS:
        raise ValueError(f"the compiled form takes {MOST_TAPS} taps at most.")
    same = None if segment_ids is None else _same(segment_ids, taps)
    inputs = [x, weight.t().flip(0), bias, same]
    given = [None if each is None else each.float().contiguous() for each in inputs]
    jobs = batch * -(-width // CHANNELS)
    sizes = length, width, taps, int(silu)
    CONVOLUTION_C.share("convolution", *given, *memory, *sizes, jobs=jobs)


def _same(segment_ids: Tensor, taps: int) -> Tensor:
    """Return bool [B, L, W], W = `taps`: whether the token 0 … W-1 steps back has the same segment
    id."""
    back = F.pad(segment_ids, (taps - 1, 0)).unfold(1, taps, 1).flip(-1)
    return back == segment_ids.unsqueeze(-1)


causal_conv1d_compiled = make_operator(
    "causal_conv1d_compiled",
    _forward,
    _backward,
    empty=lambda x, *rest: empty_like(x),
    flops=flops,
    num_gradients=3,
)
