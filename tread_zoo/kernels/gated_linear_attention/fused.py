"""Adapter of flash-linear-attention's Triton kernels, which know no segments.

They are given float32: they keep the states between their chunks in the type of what they are
given. Where a segment begins, a log-decay of `RESET` leaves 1e-26 of the state; a lower one would
cost the decays after it their digits, as they are summed over a chunk in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.packages import LibraryFunction

CHUNK_GLA = LibraryFunction("fla.ops.gla", "chunk_gla", "pip install fla-core")
RESET = -60.0


def gated_linear_attention_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return `chunk_gla`, whose arguments are laid out as ours."""
    if segment_ids is not None:
        starts = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
        log_decay = log_decay.masked_fill(starts[..., None, None], RESET)
    inputs = {"q": q, "k": k, "v": v, "g": log_decay}
    inputs = {name: value.float().contiguous() for name, value in inputs.items()}
    out, _ = CHUNK_GLA(**inputs, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    attended: Tensor = out.to(v.dtype)
    return attended


def unsuited(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, *rest: object) -> str | None:
    """Return why the kernels do not take this call, or None."""
    return "float64" if torch.float64 in (q.dtype, k.dtype, v.dtype, log_decay.dtype) else None


def limits(device: torch.device) -> str | None:
    """Return the rule of `unsuited` in words."""
    return "up to float32"
