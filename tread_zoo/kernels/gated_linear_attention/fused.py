"""Adapter of flash-linear-attention's Triton kernels, which have no segments.

Inputs are converted to float32, because the states between chunks have the dtype of the inputs. At
the start of a segment a log-decay of `RESET` leaves 1e-26 of the state. A lower log-decay would
cost later decays digits, because log-decays are summed over a chunk in float32.
"""

from torch import Tensor

from tread_zoo.kernels.chunks import reset
from tread_zoo.kernels.packages import LibraryFunction

CHUNK_GLA = LibraryFunction("fla.ops.gla", "chunk_gla", "pip install fla-core")
RESET = -60.0
NARROWEST = 16  # smallest width that Triton's matrix products take


def gated_linear_attention_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the result of `chunk_gla`, which has our layout."""
    log_decay = reset(log_decay, segment_ids, RESET)
    inputs = {"q": q, "k": k, "v": v, "g": log_decay}
    inputs = {name: value.float().contiguous() for name, value in inputs.items()}
    return CHUNK_GLA(**inputs, scale=scale)[0].to(v.dtype)


def unsuited(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> str | None:
    """Return why the package's kernel cannot take these arguments, or None if it can."""
    narrow = min(k.shape[-1], v.shape[-1]) < NARROWEST
    return f"keys or values narrower than {NARROWEST}" if narrow else None
