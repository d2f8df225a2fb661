"""Attention, of all tokens to all or under a mask.

Dimensions: B batch, H heads, N tokens, Dh width of a head.
"""

from torch import Tensor

from tread_zoo.kernels.attention.fused import (
    CPU_HALF_TOKENS,
    FLASH,
    attention_flash,
    attention_sdpa,
    flash_unsuited,
    unsuited,
)
from tread_zoo.kernels.attention.naive import attention_naive
from tread_zoo.kernels.attention.torch_form import attention_torch
from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run

register(
    "attention",
    [
        Implementation(
            "sdpa",
            attention_sdpa,
            unsuited=unsuited,
            limits=f"(in half precision on a CPU above {CPU_HALF_TOKENS} tokens)",
            fits_all=True,
        ),
        Implementation("torch", attention_torch),
        Implementation("naive", attention_naive),
        # Last in the order: torch has the same kernel, so "auto" needs no package.
        Implementation("flash-attn", attention_flash, FLASH, flash_unsuited),
    ],
    lambda normal, batch, length, heads, width: tuple(
        normal(batch, heads, length, width) for _ in range(3)
    ),
    half=(0, 1, 2),
)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q kᵀ / √Dh) v, [B, H, N, Dh].

    Args:
        q: N queries of width Dh for each of H heads, [B, H, N, Dh].
        k, v: M keys and values, [B, H, M, Dh] each.
        mask: bool [B or 1, H or 1, N, M], True where a query (row) sees a key (column); each query
            sees one or more.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    seen = None if mask is None else mask[0, 0]
    check_shapes(
        q=(q, "B H N Dh"), k=(k, "B H M Dh"), v=(v, "B H M Dh"), mask=(seen, "N M")
    )  # fmt: skip
    return run("attention", q, k, v, mask)
