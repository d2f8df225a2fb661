"""The delta rule with a diagonal-plus-low-rank transition in plain torch, by chunks.

    S_t = diag(exp(g_t)) S_{t-1} + b_t u_tᵀ + k_t v_tᵀ,  u_t = S_{t-1}ᵀ a_t,  o_t = scale S_tᵀ q_t

(RWKV-7, arXiv 2503.14456.) In a chunk of Q steps, with s_i the sum g_1 + … + g_i, S the state
before the chunk and S' the one after it,

    u_i = Σ_{j<i}  ⟨a_i, b_j⟩ u_j + ⟨a_i, k_j⟩ v_j  + Sᵀ (a_i exp(s_{i-1}))
    o_i = Σ_{j<=i} ⟨q_i, b_j⟩ u_j + ⟨q_i, k_j⟩ v_j  + Sᵀ (q_i exp(s_i))
    S'  = exp(s_Q) S + Σ_j (b_j u_jᵀ + k_j v_jᵀ) exp(s_Q - s_j)

where ⟨a_i, b_j⟩ = Σ_channels a_i b_j exp(s_{i-1} - s_j) and ⟨q_i, b_j⟩ = Σ_channels q_i b_j
exp(s_i - s_j). The first line is a unit lower triangular system for all u of the chunk. Its
solution is a part for S = 0 and a part linear in S. Both are computed for all chunks at once, so
the walk over the chunks has two small products per chunk.

⟨·,·⟩ of all pairs is one matrix product of a exp(s - m) and b exp(m - s), with m the sum in the
middle of the chunk. Two things keep the product exact for any decay. Log-decays are clamped at the
logarithm of the dtype's precision: after such a decay, what is left of a state is less than its
rounding error. And the product is in float64, which holds exp(± Q/2 · 16) (for float64 inputs, 36
instead of 16) for Q ≤ `CHUNK`. Pairs of steps in different segments are masked, not decayed.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value, T chunks of Q steps,
N = B H. a and q are stacked as rows [T, N, 2, Q, K], b and k as cols [T, N, 2, Q, K].
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.chunks import (
    CHUNK,
    at_least_float32,
    cut,
    join,
    segment_starts,
    unit_lower_inverse,
    without_autocast,
)


def dplr_delta_rule_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the recurrence; see `tread_zoo.kernels.dplr_delta_rule`."""
    with without_autocast(v.device):
        return _in_chunks(q, k, v, a, b, log_decay, segment_ids, scale)


def _in_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    batch, length, heads, _ = v.shape
    steps = math.ceil(length / math.ceil(length / CHUNK))
    dtype = at_least_float32(v, g)
    q, k, values, a, b, falls = (cut(x.to(dtype), steps) for x in (q, k, v, a, b, g))
    falls = falls.clamp_min(math.log(torch.finfo(dtype).eps))
    # a_i decays up to the step before i, q_i up to step i itself: so both have the factor exp(s_i).
    rows = torch.stack([a * torch.exp(-falls), q * scale], dim=3).flatten(1, 2)
    cols = torch.stack([b, k], dim=3).flatten(1, 2)
    values = values.flatten(1, 2)
    sums = falls.flatten(1, 2).to(torch.float64).cumsum(2)
    since = sums.to(dtype).exp()
    until = (sums[:, :, -1:] - sums).to(dtype).exp()
    places = torch.arange(2 * steps, device=v.device)
    own = (places >= steps).long()  # a sees only earlier steps, q also its own
    joined = places[:, None] % steps + own[:, None] > places % steps
    if segment_ids is not None:
        runs = _number_runs(F.pad(segment_ids, (0, -length % steps)), steps, heads)
        before = torch.cat([runs[:1, :, :1], runs[:-1, :, -1:]])  # of the step before each chunk
        joined = joined & (runs.unsqueeze(-1) == runs.unsqueeze(-2)).repeat(1, 1, 2, 2)
        since = since * (runs == before).unsqueeze(-1)
        until = until * (runs == runs[:, :, -1:]).unsqueeze(-1)
    scores: Tensor = _Scores.apply(rows, cols, sums)
    scores = scores.masked_fill(~joined, 0.0)
    # Nothing arrives at the first chunk, and nothing leaves the last one.
    by_a, by_q = (rows[1:] * since[1:].unsqueeze(2)).unbind(2)
    to_b, to_k = (cols[:-1] * until[:-1].unsqueeze(2)).unbind(2)
    of_b, of_k = scores.chunk(2, dim=-1)
    of_a, out = (of_k @ values).chunk(2, dim=-2)
    inverse = unit_lower_inverse(of_b[..., :steps, :])
    states, driven = _walk(
        inverse @ of_a, inverse[1:] @ by_a, to_b, to_k.mT @ values[:-1], since[:-1, :, -1, :, None]
    )
    out = out + of_b[..., steps:, :] @ driven
    if states:
        out = torch.cat([out[:1], out[1:] + by_q @ torch.stack(states)])
    return join(out.unflatten(1, (batch, heads)), length).to(v.dtype)


def _walk(
    alone: Tensor, carried: Tensor, to_b: Tensor, brought: Tensor, left: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the states [N, K, V] before each chunk but the first, and u [T, N, Q, V], for T chunks
    of Q steps and N = B H.

    With the state before a chunk, u = alone + carried @ state, and the state after the chunk is
    left * state + brought + to_bᵀ u. `carried` lacks the first chunk; `to_b`, `brought` and `left`
    lack the last one.
    """
    states: list[Tensor] = []
    driven = [alone[0]]
    chunks = (x.unbind(0) for x in (alone[1:], carried, to_b, brought, left))
    for u, by_state, b, added, decay in zip(*chunks, strict=True):
        kept = torch.addcmul(added, decay, states[-1]) if states else added
        states.append(torch.baddbmm(kept, b.mT, driven[-1]))
        driven.append(torch.baddbmm(u, by_state, states[-1]))
    return states, torch.stack(driven)


def _number_runs(segment_ids: Tensor, steps: int, heads: int) -> Tensor:
    """Return segment numbers [T, N, Q] for T chunks of Q = `steps` steps and N = B * `heads`.

    The segments of each batch row are counted in order, so that an id that comes back later gets
    another number.
    """
    runs = segment_starts(segment_ids).cumsum(1).unflatten(1, (-1, steps)).transpose(0, 1)
    return runs.repeat_interleave(heads, dim=1)


class _Scores(torch.autograd.Function):
    """Sums over channels of row_i col_j exp(s_i - s_j), for all pairs of steps, [T, N, 2 Q, 2 Q].

    Each of a chunk's Q steps has 2 rows and 2 cols, see the module, and s_i is the sum of the
    log-decays up to step i. Where j > i, sums may be infinite. Backward scales rows and cols again.
    """

    @staticmethod
    def forward(rows: Tensor, cols: Tensor, sums: Tensor) -> Tensor:
        r, c, _, _ = _scale(rows, cols, sums)
        return (r @ c.mT).to(rows.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, cols, sums = ctx.saved_tensors
        with without_autocast(rows.device):
            r, c, up, down = _scale(rows, cols, sums)
            wide = grad.double()
            grad_rows = (wide @ c).view(rows.shape).mul_(up).to(rows.dtype)
            grad_cols = (wide.mT @ r).view(cols.shape).mul_(down).to(cols.dtype)
            grad_sums = (rows * grad_rows - cols * grad_cols).sum(2)
        return grad_rows, grad_cols, grad_sums.double()


def _scale(rows: Tensor, cols: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows exp(s - m) and cols exp(m - s) [T, N, 2 Q, K], exp(s - m) and exp(m - s), all in
    float64; s are the `sums` of log-decays, and m is s in the middle of the chunk."""
    middle = sums.shape[2] // 2
    around = (sums - sums[:, :, middle : middle + 1]).unsqueeze(2)
    up, down = around.exp(), torch.exp(-around)
    r = rows.to(torch.float64, copy=True).mul_(up)
    c = cols.to(torch.float64, copy=True).mul_(down)
    return r.flatten(2, 3), c.flatten(2, 3), up, down
