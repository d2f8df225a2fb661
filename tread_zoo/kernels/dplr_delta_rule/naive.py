"""S_t = diag(exp(g_t)) S_{t-1} + b_t (a_tᵀ S_{t-1}) + k_t v_tᵀ, o_t = scale S_tᵀ q_t.

g is the log-decay. A state is [K, V]. Dimensions: B batch, L length, H heads, K width of a key,
V width of a value.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, segment_starts


def dplr_delta_rule_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the recurrence by its formula; see `tread_zoo.kernels.dplr_delta_rule`."""
    dtype = at_least_float32(v, log_decay)
    columns = [x.to(dtype).unsqueeze(-1) for x in (q, k, a, b, log_decay)]
    stays = torch.ones_like(columns[0][:, :, :1, :1])
    if segment_ids is not None:
        stays = (~segment_starts(segment_ids)).to(dtype).view_as(stays)
    steps = (x.unbind(1) for x in (*columns, v.to(dtype).unsqueeze(-2), stays))
    state = torch.zeros_like(k[:, 0, :, :, None] * v[:, 0, :, None], dtype=dtype)
    outs = []
    for query, key, a_t, b_t, g, value, stay in zip(*steps, strict=True):
        state = stay * state
        state = g.exp() * state + b_t * (a_t * state).sum(-2, keepdim=True) + key * value
        outs.append(scale * (query * state).sum(-2))
    return torch.stack(outs, dim=1).to(v.dtype)
