"""Attention, of all tokens to all or under a mask.

Dimensions: B batch, H heads, N tokens, Dh width of a head.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.attention.fused import (
    FLASH,
    attention_flash,
    attention_sdpa,
    flash_unsuited,
    sdpa_limits,
    sdpa_unsuited,
)
from tread_zoo.kernels.attention.naive import attention_naive
from tread_zoo.kernels.attention.torch_form import attention_torch
from tread_zoo.kernels.dispatch import Implementation, choose, register


def _example(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, 2, 70, 32, generator=generator).to(device) for _ in range(3))


register(
    "attention",
    [
        Implementation(
            "sdpa", attention_sdpa, unsuited=sdpa_unsuited, limits=sdpa_limits, fits_all=True
        ),
        Implementation("torch", attention_torch),
        Implementation("naive", attention_naive),
        # After all others: torch's own has the same kernel, so "auto" needs no package.
        Implementation("flash-attn", attention_flash, FLASH, flash_unsuited),
    ],
    _example,
    half=(0, 1, 2),
)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax(q kᵀ / √Dh) v, [B, H, N, Dh].

    Args:
        q: [B, H, N, Dh].
        k, v: [B, H, M, Dh], of one shape.
        mask: bool [B or 1, H or 1, N, M], True where a query (row) sees a key (column); each query
            sees one or more.

    Raises:
        ValueError: for shapes that do not fit each other or are not of four dimensions.
    """
    if q.ndim != 4 or k.shape != v.shape or k[:, :, :0].shape != q[:, :, :0].shape:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; "
            "they must be [B, H, N, Dh], k and v of one shape."
        )
    if mask is not None and mask.shape[-2:] != (q.shape[-2], k.shape[-2]):
        raise ValueError(f"mask has shape {tuple(mask.shape)}; expected [.., queries, keys].")
    return choose("attention", q.device, q, k, v, mask).run(q, k, v, mask)
