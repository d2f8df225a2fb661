"""Adapter of flash-linear-attention's Triton kernels: one decay per head, or one per channel.

The kernels take queries, keys and values in half precision, and no segments. With one decay per
head, a log-decay of `RESET` at the start of a segment leaves 1e-26 of the state. A lower one would
leave less, but every exponent is a difference of log-decays summed over 64 steps, and would lose
digits. With one decay per channel, some exponents are above 0 and may overflow with `RESET` in the
sum, so calls with segments are refused.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import reset
from tread_zoo.kernels.packages import LibraryFunction

CHUNK_GATED_DELTA_RULE = LibraryFunction(
    "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "pip install fla-core"
)
CHUNK_KDA = LibraryFunction("fla.ops.kda", "chunk_kda", "pip install fla-core")
RESET = -60.0
WIDEST = 256
LIMITS = f"for half precision and heads up to {WIDEST}"


def gated_delta_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the result of `chunk_gated_delta_rule` or `chunk_kda`, which have our layout."""
    falls = reset(log_decay.float(), segment_ids, RESET)
    function = CHUNK_GATED_DELTA_RULE if log_decay.ndim == 3 else CHUNK_KDA
    q, k = q.to(v.dtype), k.to(v.dtype)
    q, k, v, falls, beta = (x.contiguous() for x in (q, k, v, falls, beta))
    return function(q=q, k=k, v=v, g=falls, beta=beta, scale=scale)[0].to(v.dtype)


def unsuited(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    *rest: object,
) -> str | None:
    """Return why the package's kernels cannot take these arguments, or None if they can."""
    if segment_ids is not None and log_decay.ndim == 4:
        return "segments with a decay for each channel"
    if v.dtype not in (torch.float16, torch.bfloat16):
        return f"{v.dtype} values: half precision only"
    return f"heads wider than {WIDEST}" if max(q.shape[-1], v.shape[-1]) > WIDEST else None
