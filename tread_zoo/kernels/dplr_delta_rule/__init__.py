"""The delta rule with a diagonal-plus-low-rank transition, RWKV-7's generalised delta rule.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, check_shapes, register, run
from tread_zoo.kernels.dplr_delta_rule.fused import CHUNK_DPLR, dplr_delta_rule_fla, unsuited
from tread_zoo.kernels.dplr_delta_rule.naive import dplr_delta_rule_naive
from tread_zoo.kernels.dplr_delta_rule.torch_form import dplr_delta_rule_torch
from tread_zoo.kernels.recurrence import RECURRENCE_C, recurrence


def _example(
    normal: Callable[..., Tensor], batch: int, length: int, heads: int, width: int
) -> tuple[Any, ...]:
    q, k, v, a, rate, decay = (normal(batch, length, heads, width) for _ in range(6))
    a, rate = F.normalize(a, dim=-1), rate.sigmoid()
    decay = -torch.exp(4 * decay - 4)  # down to some -1000 a step
    segments = (torch.arange(length) // 9 % 3).expand(batch, -1)
    return q, k, v, -a, rate * a, decay, segments, 1.0


def _compiled(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Tensor:
    return recurrence(q, k, v, a, b, None, *rest)


register(
    "dplr_delta_rule",
    [
        Implementation("compiled", _compiled, RECURRENCE_C),
        Implementation(
            "fla", dplr_delta_rule_fla, CHUNK_DPLR, unsuited, "16 to 256 keys", tf32=True
        ),
        Implementation("torch", dplr_delta_rule_torch),
        Implementation("naive", dplr_delta_rule_naive),
    ],
    _example,
    half=(0, 1, 2, 3, 4),
)


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    *,
    segment_ids: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Return o_t = scale S_tᵀ q_t with S_t = (diag(exp(g_t)) + b_t a_tᵀ) S_{t-1} + k_t v_tᵀ.

    (RWKV-7, arXiv 2503.14456, with a = -κ̂ and b = κ̂ times the in-context rate; g is the
    log-decay.) Every head has a state [K, V] (width of a key, width of a value), zero before the
    first step. Decays, sums and states are float32 at least, under autocast too; the backward pass
    belongs outside autocast.

    Args:
        q, k: queries and keys [B, L, H, K].
        a, b: the two vectors of the low-rank transition, [B, L, H, K] each.
        v: values [B, L, H, V]; the result has their shape and dtype.
        log_decay: g <= 0 [B, L, H, K], of any size. A factor exp(g) below the precision of the
            dtype, exp(-16) in float32, is rounded up to that precision.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.
        scale: factor on the result.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    check_shapes(
        q=(q, "B L H K"), k=(k, "B L H K"), v=(v, "B L H V"), a=(a, "B L H K"), b=(b, "B L H K"),
        log_decay=(log_decay, "B L H K"), segment_ids=(segment_ids, "B L"),
    )  # fmt: skip
    return run("dplr_delta_rule", q, k, v, a, b, log_decay, segment_ids, scale)
