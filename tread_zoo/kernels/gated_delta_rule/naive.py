"""S_t = (I - β_t k_t k_tᵀ) diag(exp(l_t)) S_{t-1} + β_t k_t v_tᵀ,   o_t = scale S_tᵀ q_t.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, reset


def gated_delta_rule_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the rule by its formula, step by step; see `tread_zoo.kernels.gated_delta_rule`.

    The loop runs over unbound views: an index into [B, L, ...] under autograd would make the
    backward pass quadratic in L.
    """
    dtype = at_least_float32(q)
    decays = reset(log_decay.to(dtype), segment_ids).exp()
    decays = decays.unsqueeze(-1) if decays.ndim == 3 else decays
    writes = beta.to(dtype).unsqueeze(-1)
    state = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None], dtype=dtype)
    outs = []
    steps = (x.to(dtype).unsqueeze(-1).unbind(1) for x in (q, k, decays))
    rows = (x.to(dtype).unsqueeze(-2).unbind(1) for x in (v, writes))
    for query, key, decay, value, write in zip(*steps, *rows, strict=True):
        state = decay * state
        state = state + key * (write * (value - (key * state).sum(-2, keepdim=True)))
        outs.append(scale * (query * state).sum(-2))
    return torch.stack(outs, dim=1).to(v.dtype)
