"""The bidirectional WKV by its formula, one token after the other.

    out_t = [Σ_{i≠t} exp(k_i - (|p_t - p_i| - 1) w/T) v_i + exp(u + k_t) v_t] / [the same, v = 1]

Dimensions: B batch, L length, C channels.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32


def bidirectional_wkv_naive(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, positions: Tensor | None, length: int
) -> Tensor:
    """Return the WKV by its formula; see `tread_zoo.kernels.bidirectional_wkv`."""
    dtype = at_least_float32(k, v)
    keys, values, slope = k.to(dtype), v.to(dtype), w.to(dtype) / length
    places = torch.arange(k.shape[1], device=k.device)[None] if positions is None else positions
    outs = []
    for t in range(k.shape[1]):
        distance = (places - places[:, t : t + 1]).abs().unsqueeze(-1)  # [B, L, 1]
        offsets = torch.where(distance == 0, u.to(dtype), (1 - distance) * slope)
        outs.append(((keys + offsets).softmax(dim=1) * values).sum(dim=1))
    return torch.stack(outs, dim=1).to(v.dtype)
