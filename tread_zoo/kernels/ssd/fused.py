"""Adapters of two packages' Triton kernels: mamba-ssm's, and fla's gated linear attention.

Inputs are converted to float32, because the states between chunks have the dtype of the inputs.
The missing features are emulated as follows:

- mamba-ssm has one Δ for the decay and the input, and no gaps: exp(gaps Δ A) h + Δ x ⊗ B is its
  exp(Δ' A) h + Δ' x' ⊗ B with Δ' = gaps Δ and x' = x / gaps. D x is then added outside. The kernel
  restarts exactly where `seq_idx` differs; ids that occur again later are renumbered.
- fla takes any log-decay, but no segments. At the start of a segment, a log-decay of `RESET` leaves
  1e-26 of the state. A lower log-decay would leave less, but log-decays are summed over 64 steps in
  float32 and would lose digits. With `RESET`, the decays between steps have an error of 4e-6 if one
  segment starts in a chunk, and of 2e-4 at most. Products in TF32 have a larger error.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import reset, segment_starts
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
    """Return the result of mamba_ssm's `mamba_chunk_scan_combined`, for tensors in our layout."""
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
        seq_idx=(
            None
            if segment_ids is None
            else segment_starts(segment_ids).cumsum(1, dtype=torch.int32)
        ),
    )
    if gaps is not None and skip is not None:
        y = y + skip.unsqueeze(-1) * u
    return y.to(x.dtype)


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
    """Return `chunk_simple_gla` of queries C, keys B, values Δ x and log-decays gaps Δ A."""
    heads = x.shape[2] // B.shape[2]
    u, step = x.float(), delta.float()
    falls = step * A.float()
    if gaps is not None:
        falls = falls * gaps.float().unsqueeze(-1)
    y, _ = CHUNK_SIMPLE_GLA(
        q=C.float().repeat_interleave(heads, dim=2),
        k=B.float().repeat_interleave(heads, dim=2),
        v=step.unsqueeze(-1) * u,
        g=reset(falls, segment_ids, RESET),
        scale=1.0,
    )
    return (y if D is None else y + D.float().unsqueeze(-1) * u).to(x.dtype)
