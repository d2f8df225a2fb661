"""The bidirectional WKV in C for a CPU: one pass over the tokens in each direction.

The maths is that of `triton_form`, with a running maximum but without chunks. Autograd keeps the
inputs, the output and ℓ, the logarithm of the output's denominator. Rows of the batch and blocks of
channels are independent of each other, so the number of threads changes no bit. ∂w and ∂u are
summed over the rows afterwards.

Dimensions: B batch, L length, C channels.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.bidirectional_wkv.torch_form import flops, outputs_like
from tread_zoo.kernels.compiled import CompiledSource
from tread_zoo.kernels.operators import make_operator

CHANNELS = 64  # per block, as in wkv.c
WKV_C = CompiledSource(Path(__file__).with_name("wkv.c"))


def _forward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> tuple[Tensor, Tensor]:
    """Return the output and, in float32, the logarithm ℓ of its denominator: both [B, L, C]."""
    out, lse = (torch.empty(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    _run((k, v, w / length, u, positions), out, lse, *[None] * 5)
    return out.to(v.dtype), lse


def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, w and u. `grad` is the gradient of the output; `out` and `lse`
    are the results of `_forward`, and `args` its arguments."""
    k, v, w, u, positions, length = args
    gk, gv = (torch.empty_like(lse) for _ in range(2))
    gw, gu = lse.new_empty(2, *k.shape[::2])
    given = (x.float().contiguous() for x in (out, lse, grad))
    _run((k, v, w / length, u, positions), *given, gk, gv, gw, gu)
    gw, gu = gw.sum(0) / length, gu.sum(0)
    return gk.to(k.dtype), gv.to(v.dtype), gw.to(w.dtype), gu.to(u.dtype)


def _run(inputs: tuple[Tensor | None, ...], *memory: Tensor | None) -> None:
    given = [None if x is None else x.float().contiguous() for x in inputs]
    batch, length, channels = memory[0].shape  # type: ignore[union-attr]
    jobs = batch * -(-channels // CHANNELS)
    WKV_C.share("wkv", *given, *memory, length, channels, jobs=jobs)


bidirectional_wkv_compiled = make_operator(
    "bidirectional_wkv_compiled",
    _forward,
    _backward,
    empty=outputs_like,
    flops=flops,
    num_gradients=4,
    num_kept=2,
)
