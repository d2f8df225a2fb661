"""The gated delta rule: linear attention whose writes replace the state's value for a key.

With one decay per head it is the rule of Gated DeltaNet, with one decay per channel the rule of
Kimi Delta Attention (`kda`). Packages have a kernel for each, so dispatch has two operations.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run
from tread_zoo.kernels.gated_delta_rule.fused import (
    CHUNK_GATED_DELTA_RULE,
    CHUNK_KDA,
    LIMITS,
    gated_delta_rule_fla,
    unsuited,
)
from tread_zoo.kernels.gated_delta_rule.naive import gated_delta_rule_naive
from tread_zoo.kernels.gated_delta_rule.torch_form import gated_delta_rule_torch
from tread_zoo.kernels.recurrence import RECURRENCE_C, recurrence


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Any, ...]:
    tokens = (batch, length, heads)
    q, k, v, gates = (normal(*tokens, width) for _ in range(4))
    falls, segments = -F.softplus(2 * gates[..., 0]), torch.arange(length) // 9 % 3
    beta = normal(*tokens).sigmoid()
    return q, F.normalize(k, dim=-1), v, beta, falls, segments.expand(batch, -1), width**-0.5


def _example_by_channel(normal: Callable[..., Tensor], *sizes: int) -> tuple[Any, ...]:
    q, k, v, beta, *_, scale = _example(normal, *sizes)
    return q, k, v, beta, -F.softplus(2 * normal(*q.shape)), None, scale


def _compiled(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, *rest: Any
) -> Tensor:
    return recurrence(q, k, v, None, None, beta, log_decay, *rest)


for name, fla, example in (
    ("gated_delta_rule", CHUNK_GATED_DELTA_RULE, _example),
    ("kda", CHUNK_KDA, _example_by_channel),
):
    register(
        name,
        [
            Implementation("compiled", _compiled, RECURRENCE_C),
            Implementation("fla", gated_delta_rule_fla, fla, unsuited, LIMITS),
            Implementation("torch", gated_delta_rule_torch),
            Implementation("naive", gated_delta_rule_naive),
        ],
        example,
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
    """Return o_t = scale S_tᵀ q_t [B, L, H, V], of the dtype of v. Each head has the states [K, V]

        S_t = (I - β_t k_t k_tᵀ) diag(exp(log_decay_t)) S_{t-1} + β_t k_t v_tᵀ

    from S_0 = 0, for keys of width K and values of width V (Gated DeltaNet, arXiv 2412.06464,
    equation 10; with a decay for each channel Kimi Delta Attention, arXiv 2510.26692). Decays,
    states and all values between are float32 at least, under autocast too.

    Args:
        q: [B, L, H, K].
        k: [B, L, H, K], of norm 1: the rule is stable for β |k|² up to 2.
        v: [B, L, H, V].
        beta: the fraction of the state's value for k that is replaced [B, L, H].
        log_decay: at most 0, per head [B, L, H] or per channel of keys [B, L, H, K].
        scale: K^-½ by default.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    by_channel = log_decay.ndim == 4
    check_shapes(
        q=(q, "B L H K"), k=(k, "B L H K"), v=(v, "B L H V"), beta=(beta, "B L H"),
        log_decay=(log_decay, "B L H K" if by_channel else "B L H"),
        segment_ids=(segment_ids, "B L"),
    )  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    op = "kda" if by_channel else "gated_delta_rule"
    return run(op, q, k, v, beta, log_decay, segment_ids, scale)
