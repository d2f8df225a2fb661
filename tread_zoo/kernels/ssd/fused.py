"""Adapters of two packages' Triton kernels: mamba-ssm's, and fla's gated linear attention.

Both are given float32: they keep the states between their chunks in the type of what they are
given. How each is brought to what it does not know of itself:

- mamba-ssm has one Δ for the decay and the input, and no gaps: exp(gaps Δ A) h + Δ x ⊗ B is its
  exp(Δ' A) h + Δ' x' ⊗ B with Δ' = gaps Δ and x' = x / gaps. D x is then added outside. It restarts
  where `seq_idx` differs, by comparing, hence exactly; ids that come back are numbered anew.
- fla takes any log-decay, and no segments. Where one begins, a log-decay of `RESET` leaves 1e-26 of
  the state. A lower one would leave less, but what is summed over a chunk of 64 steps in float32
  loses the digits of the decays after it: with this one the weights are off by 4e-6 after one start
  in a chunk and by 2e-4 at most, less than the kernel's products in TF32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.packages import LibraryFunction

CHUNK_SCAN = LibraryFunction(
    "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined", "pip install kernels"
)
CHUNK_SIMPLE_GLA = LibraryFunction("fla.ops.simple_gla", "chunk_simple_gla", "pip install fla-core")
CHUNK = 64
RESET = -60.0


def ssd_mamba(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
    gaps: Tensor | None = None,
) -> Tensor:
    """Return `mamba_chunk_scan_combined`, whose arguments are laid out as ours."""
    u, step, skip = x.float(), delta.float(), None if D is None else D.float()
    inputs = u
    if gaps is not None:
        apart = gaps.float().unsqueeze(-1)
        inputs, step = u / apart.unsqueeze(-1), step * apart
    y = CHUNK_SCAN(
        inputs.contiguous(),
        step.contiguous(),
        A.float().contiguous(),
        B.float().contiguous(),
        C.float().contiguous(),
        CHUNK,
        D=skip if gaps is None else None,
        seq_idx=None if segment_ids is None else _starts(segment_ids).cumsum(1, dtype=torch.int32),
    )
    if gaps is not None and skip is not None:
        y = y + skip.unsqueeze(-1) * u
    out: Tensor = y.to(x.dtype)
    return out


def ssd_fla(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    segment_ids: Tensor | None = None,
    gaps: Tensor | None = None,
) -> Tensor:
    """Return `chunk_simple_gla` with queries C, keys B, values Δ x and log-decays gaps Δ A."""
    heads = x.shape[2] // B.shape[2]
    u, step = x.float(), delta.float()
    falls = step * A.float()
    if gaps is not None:
        falls = falls * gaps.float().unsqueeze(-1)
    if segment_ids is not None:
        falls = falls.masked_fill(_starts(segment_ids).unsqueeze(-1), RESET)
    y, _ = CHUNK_SIMPLE_GLA(
        q=C.float().repeat_interleave(heads, dim=2),
        k=B.float().repeat_interleave(heads, dim=2),
        v=step.unsqueeze(-1) * u,
        g=falls,
        scale=1.0,
    )
    out: Tensor = (y if D is None else y + D.float().unsqueeze(-1) * u).to(x.dtype)
    return out


def unsuited(x: Tensor, delta: Tensor, *rest: Tensor | None) -> str | None:
    """Return why the kernels do not take this call, or None."""
    return "float64" if torch.float64 in (x.dtype, delta.dtype) else None


def limits(device: torch.device) -> str | None:
    """Return the rule of `unsuited` in words."""
    return "up to float32"


def _starts(segment_ids: Tensor) -> Tensor:
    """Return bool [B, L]: where a segment begins, but for the first one."""
    return F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
