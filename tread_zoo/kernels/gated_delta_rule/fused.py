"""An adapter of flash-linear-attention's Triton kernels: one decay a head, or one a channel.

They take queries, keys and values in half precision, and no segments. Where one begins, a log-decay
of `RESET` leaves 1e-26 of the state to the rule with a decay for each head, which takes every
exponent from a difference of sums over 64 steps. That with one for each channel has exponents above
0 on its way, and gets no such call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.packages import LibraryFunction

CHUNK_GATED_DELTA_RULE = LibraryFunction(
    "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "pip install fla-core"
)
CHUNK_KDA = LibraryFunction("fla.ops.kda", "chunk_kda", "pip install fla-core")
RESET = -60.0
WIDEST = 256


def gated_delta_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return `chunk_gated_delta_rule` or `chunk_kda`, whose arguments are laid out as ours."""
    falls = log_decay.float()
    if segment_ids is not None:
        starts = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        falls = falls.masked_fill(starts.unsqueeze(-1), RESET)
    function = CHUNK_GATED_DELTA_RULE if log_decay.ndim == 3 else CHUNK_KDA
    q, k = q.to(v.dtype), k.to(v.dtype)
    q, k, v, falls, beta = (x.contiguous() for x in (q, k, v, falls, beta))
    out: Tensor = function(q=q, k=k, v=v, g=falls, beta=beta, scale=scale)[0]
    return out.to(v.dtype)


def unsuited(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> str | None:
    """Return why the kernels do not take this call, or None."""
    if segment_ids is not None and log_decay.ndim == 4:
        return "segments with a decay for each channel"
    if v.dtype not in (torch.float16, torch.bfloat16):
        return f"{v.dtype} values: half precision only"
    return f"heads wider than {WIDEST}" if max(q.shape[-1], v.shape[-1]) > WIDEST else None


def limits(device: torch.device) -> str | None:
    """Return the rules of `unsuited` in words."""
    return f"for half precision and heads up to {WIDEST}"
