"""The bidirectional WKV of Vision-RWKV and Diffusion-RWKV, a weighted mean over all tokens.

Dimensions: B batch, L length, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tread_zoo.kernels.bidirectional_wkv.compiled_form import WKV_C, bidirectional_wkv_compiled
from tread_zoo.kernels.bidirectional_wkv.naive import bidirectional_wkv_naive
from tread_zoo.kernels.bidirectional_wkv.torch_form import bidirectional_wkv_torch
from tread_zoo.kernels.bidirectional_wkv.triton_form import bidirectional_wkv_triton
from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run
from tread_zoo.kernels.launch import TRITON


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Any, ...]:
    width *= heads
    k, v = normal(batch, length, width), normal(batch, length, width)
    w, u = torch.linspace(0, 20, width), torch.linspace(-1, 1, width)
    return k, v, w, u, torch.arange(0, 2 * length, 2).expand(batch, -1), 2 * length


register(
    "bidirectional_wkv",
    [
        Implementation("compiled", bidirectional_wkv_compiled, WKV_C),
        Implementation("triton", bidirectional_wkv_triton, TRITON),
        Implementation("torch", bidirectional_wkv_torch),
        Implementation("naive", bidirectional_wkv_naive),
    ],
    _example,
    half=(0, 1),
)


def bidirectional_wkv(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    positions: Tensor | None = None,
    length: int | None = None,
) -> Tensor:
    """Return, for every channel, a mean of v weighted by key and distance, [B, L, C].

        out_t = [Σ_{i≠t} exp(k_i - (|p_t - p_i| - 1) w/T) v_i + exp(u + k_t) v_t] / [same, v = 1]

    (Vision-RWKV, arXiv 2403.02308, eq. 7, as Diffusion-RWKV, arXiv 2404.04478, uses it.) The sums
    are float32 at least, under autocast too.

    Args:
        k: keys [B, L, C].
        v: values [B, L, C]; the output has their dtype.
        w: decay rates [C]; with a negative rate, weights grow with the distance.
        u: bonus on the key of the token itself [C].
        positions: p, int64 [B, L], ascending in each row, in 0 … T-1; None means 0 … L-1. Tokens of
            a subset keep their positions in the full sequence.
        length: T, the length of the whole sequence; None means L.

    Raises:
        ValueError: for an empty input, shapes that do not fit together, a length below L, or
            positions that do not ascend or lie outside 0 … T-1 (checked on the CPU only).
    """
    check_shapes(
        k=(k, "B L C"), v=(v, "B L C"), w=(w, "C"), u=(u, "C"), positions=(positions, "B L")
    )
    length = k.shape[1] if length is None else length
    if length < k.shape[1]:
        raise ValueError(f"length={length} is of the whole sequence: at least {k.shape[1]}.")
    if positions is not None:
        _check_order(positions, length)
    return run("bidirectional_wkv", k, v, w, u, positions, length)


def _check_order(positions: Tensor, length: int) -> None:
    if positions.device.type != "cpu" or torch.compiler.is_compiling():
        return  # reading the positions would wait for the device, or break the graph
    if bool((positions.diff(dim=1) <= 0).any()):
        raise ValueError("positions must ascend in every row; sort the tokens by them.")
    if bool((positions[:, 0] < 0).any()) or bool((positions[:, -1] >= length).any()):
        raise ValueError(f"positions lie outside 0 … {length - 1}; length is the whole sequence's.")
