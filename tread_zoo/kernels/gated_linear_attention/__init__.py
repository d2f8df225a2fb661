"""Gated linear attention: a matrix state whose every row has a decay of its own at each step.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, choose, register
from tread_zoo.kernels.gated_linear_attention.fused import (
    CHUNK_GLA,
    gated_linear_attention_fla,
    limits,
    unsuited,
)
from tread_zoo.kernels.gated_linear_attention.naive import gated_linear_attention_naive
from tread_zoo.kernels.gated_linear_attention.torch_form import gated_linear_attention_torch


def _example(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 70, 2, 32)
    q, k, v, gate = (torch.randn(shape, generator=generator) for _ in range(4))
    segments = (torch.arange(70) // 9 % 3).expand(2, -1).contiguous()
    return tuple(x.to(device) for x in (q, k, v, F.logsigmoid(gate), segments))


register(
    "gated_linear_attention",
    [
        Implementation("fla", gated_linear_attention_fla, CHUNK_GLA, unsuited, limits, tf32=True),
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

    (Gated linear attention, arXiv 2312.06635, equation 3.) Every head has a state [K, V], zero
    before the first step. Decays and states are float32 at least, under autocast too. Where a
    token stands g steps after the one before it, log_decay times g is what g steps leave.

    Args:
        q, k: queries and keys [B, L, H, K].
        v: values [B, L, H, V]; o has their shape and dtype.
        log_decay: logarithms of the decays, at most 0, [B, L, H, K].
        scale: K^-1/2 by default.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    if q.ndim != 4 or v.ndim != 4 or q.numel() == 0 or v.numel() == 0:
        raise ValueError(
            f"q and v have shapes {tuple(q.shape)} and {tuple(v.shape)}; they must be "
            "[B, L, H, K] and [B, L, H, V], none of them 0."
        )
    wanted = {
        "k": (k, q.shape),
        "v": (v, (*q.shape[:3], v.shape[3])),
        "log_decay": (log_decay, q.shape),
        "segment_ids": (segment_ids, q.shape[:2]),
    }
    for name, (value, shape) in wanted.items():
        if value is not None and value.shape != shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {tuple(shape)}.")
    if segment_ids is not None and (segment_ids.is_floating_point() or segment_ids.is_complex()):
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}; it must be of integers.")
    args = (q, k, v, log_decay, segment_ids, scale)
    return choose("gated_linear_attention", q.device, *args).run(*args)
