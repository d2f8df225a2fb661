"""The delta rule with a diagonal-plus-low-rank transition, RWKV-7's generalised delta rule.

Dimensions: B batch, L length, H heads, K keys, V values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.dispatch import Implementation, choose, register
from tread_zoo.kernels.dplr_delta_rule.fused import (
    CHUNK_DPLR,
    dplr_delta_rule_fla,
    limits,
    unsuited,
)
from tread_zoo.kernels.dplr_delta_rule.naive import dplr_delta_rule_naive
from tread_zoo.kernels.dplr_delta_rule.torch_form import dplr_delta_rule_torch


def _example(device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 70, 2, 32)
    q, k, v, a, rate, decay = (torch.randn(shape, generator=generator) for _ in range(6))
    a, rate = F.normalize(a, dim=-1), rate.sigmoid()
    decay = -torch.exp(4 * decay - 4)  # down to some -1000 a step
    segments = (torch.arange(shape[1]) // 9 % 3).expand(shape[0], -1).contiguous()
    return tuple(x.to(device) for x in (q, k, v, -a, rate * a, decay, segments))


register(
    "dplr_delta_rule",
    [
        Implementation("fla", dplr_delta_rule_fla, CHUNK_DPLR, unsuited, limits, tf32=True),
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
    log-decay.) Every head has a state [K, V], zero before the first step. Decays, sums and states
    are float32 at least, under autocast too; the backward pass belongs outside autocast.

    Args:
        q, k, a, b: queries, keys and the low-rank transition [B, L, H, K].
        v: values [B, L, H, V]; the result has their shape and dtype.
        log_decay: g <= 0 [B, L, H, K], as low as one likes: what it leaves of a state below the
            precision of the type, exp(-16) in float32, counts as that.
        segment_ids: integers [B, L]; the state restarts from zero where the id changes.
        scale: factor on the result.

    Raises:
        ValueError: for an empty input or shapes that do not fit together.
    """
    if v.ndim != 4 or v.numel() == 0:
        raise ValueError(f"v has shape {tuple(v.shape)}; it must be [B, L, H, V], none of them 0.")
    if q.ndim != 4 or q.shape[:3] != v.shape[:3] or q.numel() == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must be {[*v.shape[:3], 'K']}.")
    wanted = {"k": k, "a": a, "b": b, "log_decay": log_decay}
    for name, value in wanted.items():
        if value.shape != q.shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}; q has {tuple(q.shape)}.")
    if segment_ids is not None and segment_ids.shape != v.shape[:2]:
        raise ValueError(f"segment_ids has shape {tuple(segment_ids.shape)}; it must be [B, L].")
    if segment_ids is not None and (segment_ids.is_floating_point() or segment_ids.is_complex()):
        raise ValueError(f"segment_ids has dtype {segment_ids.dtype}; it must be of integers.")
    args = (q, k, v, a, b, log_decay, segment_ids, scale)
    return choose("dplr_delta_rule", v.device, *args).run(*args)
