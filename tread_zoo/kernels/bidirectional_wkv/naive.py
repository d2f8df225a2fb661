"""The bidirectional WKV by its formula, all pairs of tokens at once.

    out_t = [Σ_{i≠t} exp(k_i - (|p_t - p_i| - 1) w/T) v_i + exp(u + k_t) v_t] / [the same, v = 1]

Dimensions: B batch, L length, C channels.
"""

import torch
from torch import Tensor


def bidirectional_wkv_naive(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return the WKV as a softmax over a [B, L, L, C] table of log-weights."""
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    places = torch.arange(k.shape[1], device=k.device)[None] if positions is None else positions
    distance = (places.unsqueeze(2) - places.unsqueeze(1)).abs().unsqueeze(-1)  # [B, t, i, 1]
    decay = w.to(dtype) / length
    # 0 * inf at distance 1 would be NaN where the decay overflows, so neighbours are set apart.
    fall = torch.where(distance > 1, (distance - 1) * decay, torch.zeros_like(decay))
    log_weights = k.to(dtype).unsqueeze(1) + torch.where(distance == 0, u.to(dtype), -fall)
    return (log_weights.softmax(dim=2) * v.to(dtype).unsqueeze(1)).sum(dim=2).to(v.dtype)
