"""The gated delta rule in plain torch: matrix products within chunks, a short scan between them.

In a chunk of Q steps with S the state before it and s_ij = l_{j+1} + … + l_i (the log-decays,
j = 0 for the chunk's start), the rule is linear attention over corrected values v': the given
values minus the state's present values for the keys (the WY form, arXiv 2406.06484 and 2412.06464):

    a_ij = -β_i k_i · exp(s_ij) k_j  for j < i,   M = (I - a)^-1
    v'   = M (β v) - M (β exp(s_i0) k) S
    o_i  = scale [ exp(s_i0) q_i · S + Σ_{j <= i} (q_i · exp(s_ij) k_j) v'_j ]
    S'   = exp(s_Q0) S + Σ_j exp(s_Qj) k_j v'_jᵀ

Every s is a sum, never a difference of sums, and no exponent is above 0. So no decay is too strong,
and weak decays next to strong ones keep their digits. A segment begins with a log-decay of -inf.

T chunks, N = B H, Q steps of a chunk (a power of two), K width of a key, V width of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.chunks import (
    CHUNK,
    at_least_float32,
    cut,
    join,
    power_of_two,
    reset,
    unit_lower_inverse,
    without_autocast,
)


def gated_delta_rule_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the rule; see `tread_zoo.kernels.gated_delta_rule`."""
    falls = log_decay.unsqueeze(-1) if log_decay.ndim == 3 else log_decay
    dtype, steps = at_least_float32(q), max(2, power_of_two(q.shape[1], CHUNK))
    inputs = (q, k, v, beta.unsqueeze(-1), reset(falls, segment_ids))
    with without_autocast(q.device):
        given = (cut(x.to(dtype), steps).contiguous().flatten(1, 2) for x in inputs)
        out = _rule(*given).mul(scale).unflatten(1, (len(q), -1))
    return join(out, q.shape[1]).to(v.dtype)


def _rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, falls: Tensor) -> Tensor:
    """Return the output before it is multiplied by the scale, [T, N, Q, V], for T chunks of Q steps
    and N = B H. `falls` are the log-decays [T, N, Q, 1 or K]."""
    written = beta * k
    products = _decayed_products if falls.shape[-1] == 1 else _decayed_products_by_channel
    scores, before, after = products(torch.stack([q, written], dim=2), k, falls)
    attention, overlaps = scores.unbind(2)
    since, until = before.exp(), after.exp()
    inverse = unit_lower_inverse(-overlaps)
    reads = torch.cat([inverse @ (since * written), since * q], dim=-2)
    writes = torch.cat([attention, (until * k).mT], dim=-2)
    return _scan(inverse @ (beta * v), reads, writes, since[..., -1:, :].mT)


def _scan(values: Tensor, reads: Tensor, writes: Tensor, totals: Tensor) -> Tensor:
    """Return the output before it is multiplied by the scale, [T, N, Q, V], chunk by chunk.

    Args:
        values: the part of v' that is independent of the state, [T, N, Q, V].
        reads: factors on the state, for v' (Q rows) and for o, [T, N, 2 Q, K].
        writes: factors on v', for o (Q rows) and for the next state, [T, N, Q + K, Q].
        totals: decays of the state over a chunk [T, N, 1 or K, 1].
    """
    steps = values.shape[-2]
    state, outs = None, []
    for value, read, write, total in zip(values, reads, writes, totals, strict=True):
        if state is None:
            out, state = (write @ value).split([steps, write.shape[-2] - steps], dim=-2)
        else:
            known, recalled = (read @ state).chunk(2, dim=-2)
            here, added = (write @ (value - known)).split([steps, write.shape[-2] - steps], dim=-2)
            out, state = here + recalled, added + total * state
        outs.append(out)
    return torch.stack(outs)


def _decayed_products(x: Tensor, k: Tensor, falls: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return x_i · exp(s_ij) k_j for j <= i, else 0, [T, N, 2, Q, Q]; then s_i0 and s_Qj,
    [T, N, Q, 1] each.

    s_ij is the sum of the log-decays `falls` [T, N, Q, 1] over the steps j+1 … i of a chunk of Q
    steps. x has two vectors per step, [T, N, 2, Q, K].
    """
    length = x.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(-1)
    sums = falls.masked_fill(~later, 0).cumsum(-2)  # s_ij: for each j, of the steps after it
    products = (x.flatten(2, 3) @ k.mT).unflatten(2, (2, -1))
    return (products * sums.exp().unsqueeze(2)).tril(), falls.cumsum(-2), sums[..., -1:, :].mT


def _decayed_products_by_channel(
    x: Tensor, k: Tensor, falls: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_decayed_products` does, for log-decays per channel, `falls` [T, N, Q, K]. The
    sums s are [T, N, Q, K], too.

    Blocks of steps are joined in pairs until each chunk is one block. The products between a later
    and an earlier block use x decayed since the boundary and k decayed until the boundary.
    """
    products = (x * k.unsqueeze(2)).sum(-1).mT[..., None, None]  # [T, N, Q / size, 2, size, size]
    before = falls.unsqueeze(-2)  # within a block up to a step [T, N, Q / size, size, K]
    after = torch.zeros_like(before)  # and from it on
    size = 1
    while size < x.shape[-2]:
        (first, second), (since, later), (until, last) = (
            each.unflatten(2, (-1, 2)).unbind(3) for each in (products, before, after)
        )
        queries = x.unflatten(3, (-1, 2, size))[..., 1, :, :].transpose(2, 3)
        queries = (queries * later.exp().unsqueeze(3)).flatten(3, 4)
        keys = k.unflatten(2, (-1, 2, size))[..., 0, :, :] * until.exp()
        between = (queries @ keys.mT).unflatten(3, (2, size))
        rows = F.pad(first, (0, size)), torch.cat([between, second], dim=-1)
        products = torch.cat(rows, dim=-2)
        before = torch.cat([since, later + since[..., -1:, :]], dim=-2)
        after = torch.cat([until + later[..., -1:, :], last], dim=-2)
        size *= 2
    return products.squeeze(2), before.squeeze(2), after.squeeze(2)
