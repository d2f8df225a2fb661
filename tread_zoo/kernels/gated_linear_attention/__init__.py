"""Gated linear attention: each row of a matrix state has its own decay at each step.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run
from tread_zoo.kernels.gated_linear_attention.fused import (
    CHUNK_GLA,
    gated_linear_attention_fla,
    unsuited,
)
from tread_zoo.kernels.gated_linear_attention.naive import gated_linear_attention_naive
from tread_zoo.kernels.gated_linear_attention.torch_form import gated_linear_attention_torch
from tread_zoo.kernels.recurrence import RECURRENCE_C, recurrence


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Any, ...]:
    q, k, v, gate = (normal(batch, length, heads, width) for _ in range(4))
    segments = (torch.arange(length) // 9 % 3).expand(batch, -1)
    return q, k, v, F.logsigmoid(gate), segments, width**-0.5


def _compiled(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: Any) -> Tensor:
    return recurrence(q, k, v, None, None, None, log_decay, *rest)


register(
    "gated_linear_attention",
    [
        Implementation("compiled", _compiled, RECURRENCE_C),
        Implementation(
            "fla", gated_linear_attention_fla, CHUNK_GLA, unsuited, "from 16 keys on", tf32=True
        ),
        Implementation("torch", gated_linear_attention_torch),
        Implementation("naive", gated_linear_attention_naive),
    ],
    _example,
    half=(0, 1, 2),
)


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return o_t = scale S_tᵀ q_t with S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_tᵀ.

    (Gated linear attention, arXiv 2312.06635, equation 3.) Every head has a state [K, V] (width of
    a key, width of a value), zero before the first step. Decays and states are float32 at least,
    under autocast too. For a token g steps after the token before it, multiply log_decay by g.

    Args:
        q, k: queries and keys [B, L, H, K].
        v: values [B, L, H, V]; o has their shape and dtype.
        log_decay: logarithms of the decays, at most 0, [B, L, H, K].
        scale: K^-1/2 by default.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    check_shapes(
        q=(q, "B L H K"), k=(k, "B L H K"), v=(v, "B L H V"), log_decay=(log_decay, "B L H K"),
        segment_ids=(segment_ids, "B L"),
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return run("gated_linear_attention", q, k, v, log_decay, segment_ids, scale)
