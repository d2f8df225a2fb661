"""Adapter of flash-linear-attention's Triton kernel; importing that package needs triton.

The kernel does not support segments. Where a segment begins, a log-decay of `RESET` leaves 1e-13 of
the state, and `a` is set to 0, so that the low-rank term does not read the state. A lower log-decay
would leave less, but the kernel sums log-decays over 16 steps in float32, and the sum would lose
the digits of later decays.
"""

from torch import Tensor

from tread_zoo.kernels.chunks import reset
from tread_zoo.kernels.packages import LibraryFunction

CHUNK_DPLR = LibraryFunction(
    "fla.ops.generalized_delta_rule", "chunk_dplr_delta_rule", "pip install fla-core"
)
RESET = -30.0
NARROWEST = 16  # smallest width that Triton's matrix products take


def dplr_delta_rule_fla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the result of `chunk_dplr_delta_rule`, which fla's RWKV-7 function calls, too."""
    falls = reset(log_decay.float().clamp_min(RESET), segment_ids, RESET)
    given = [x.to(v.dtype).contiguous() for x in (q, k, v, reset(a, segment_ids, 0.0), b)]
    return CHUNK_DPLR(*given, falls.contiguous(), scale=scale)[0].to(v.dtype)


def unsuited(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> str | None:
    """Return why the package's kernel cannot take these arguments, or None if it can."""
    widths = k.shape[-1], v.shape[-1]
    if max(widths) > 256:
        return "keys or values wider than 256"
    return f"keys or values narrower than {NARROWEST}" if min(widths) < NARROWEST else None
