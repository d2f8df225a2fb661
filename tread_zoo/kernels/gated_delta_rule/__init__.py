"""The gated delta rule: a linear attention whose writes replace what its state has for a key.

With one decay a head it is Gated DeltaNet's, with one a channel Kimi Delta Attention's (`kda`):
packages have a kernel for each, so that dispatch knows two operations by one function.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, choose, register
from tread_zoo.kernels.gated_delta_rule.fused import (
    CHUNK_GATED_DELTA_RULE,
    CHUNK_KDA,
    gated_delta_rule_fla,
    limits,
    unsuited,
)
from tread_zoo.kernels.gated_delta_rule.naive import gated_delta_rule_naive
from tread_zoo.kernels.gated_delta_rule.torch_form import gated_delta_rule_torch


def _make_example(by_channel: bool) -> Callable[[torch.device], tuple[Tensor | None, ...]]:
    def example(device: torch.device) -> tuple[Tensor | None, ...]:
        generator = torch.Generator().manual_seed(0)
        tokens, width = (2, 70, 2), 32
        q, k, v = (torch.randn(*tokens, width, generator=generator) for _ in range(3))
        beta = torch.randn(*tokens, generator=generator).sigmoid()
        gates = torch.randn(*tokens, *[width][:by_channel], generator=generator)
        segments = (torch.arange(70) // 9 % 3).expand(2, -1).contiguous()
        values = (q, F.normalize(k, dim=-1), v, beta, -F.softplus(2 * gates))
        return *(x.to(device) for x in values), None if by_channel else segments.to(device)

    return example


for name, fla in (("gated_delta_rule", CHUNK_GATED_DELTA_RULE), ("kda", CHUNK_KDA)):
    register(
        name,
        [
            Implementation("fla", gated_delta_rule_fla, fla, unsuited, limits),
            Implementation("torch", gated_delta_rule_torch),
            Implementation("naive", gated_delta_rule_naive),
        ],
        _make_example(by_channel=name == "kda"),
        half=(0, 1, 2),
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    scale: float | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Return o_t = scale S_tᵀ q_t [B, L, H, V], of the dtype of v, with the states [K, V]

        S_t = (I - β_t k_t k_tᵀ) diag(exp(log_decay_t)) S_{t-1} + β_t k_t v_tᵀ

    from S_0 = 0 (Gated DeltaNet, arXiv 2412.06464, equation 10; with a decay for each channel Kimi
    Delta Attention, arXiv 2510.26692). Decays, the states and all between are float32 at least,
    under autocast too.

    Args:
        q: [B, L, H, K].
        k: [B, L, H, K], of norm 1: the rule is stable for β |k|² up to 2.
        v: [B, L, H, V].
        beta: how much of what the state has for k is replaced [B, L, H].
        log_decay: at most 0, one number a head [B, L, H] or one a channel of keys [B, L, H, K].
        scale: K^-½ by default.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    if q.ndim != 4 or q.numel() == 0 or v.ndim != 4 or v.numel() == 0:
        raise ValueError(f"q {tuple(q.shape)} and v {tuple(v.shape)} must be [B, L, H, K or V].")
    tokens, by_channel = tuple(q.shape[:3]), log_decay.ndim == 4
    wanted = {
        "k": (k, tuple(q.shape)),
        "v": (v, (*tokens, v.shape[-1])),
        "beta": (beta, tokens),
        "log_decay": (log_decay, tuple(q.shape) if by_channel else tokens),
        "segment_ids": (segment_ids, tokens[:2]),
    }
    for argument, (value, shape) in wanted.items():
        if value is not None and tuple(value.shape) != shape:
            raise ValueError(f"{argument} has shape {tuple(value.shape)}; it must be {shape}.")
    args = (q, k, v, beta, log_decay, segment_ids, scale)
    return choose("kda" if by_channel else "gated_delta_rule", q.device, *args).run(*args)
