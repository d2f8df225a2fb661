"""S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_tᵀ,   o_t = scale S_tᵀ q_t, step by step.

Dimensions: B batch, L length, H heads, K width of a key, V width of a value.
"""

import torch
from torch import Tensor

from tread_zoo.kernels.chunks import at_least_float32, reset


def gated_linear_attention_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    segment_ids: Tensor | None,
    scale: float,
) -> Tensor:
    """Return the attention by its formula; see `tread_zoo.kernels.gated_linear_attention`.

    The loop runs over unbound views: an index into [B, L, H, K] under autograd would make the
    backward pass quadratic in L.
    """
    dtype = at_least_float32(q, k, v, log_decay)
    decay = reset(log_decay.to(dtype), segment_ids).exp()
    columns = (x.to(dtype).unsqueeze(-1).unbind(1) for x in (q, k, decay))
    state, outputs = torch.zeros((), dtype=dtype, device=q.device), []
    for q_t, k_t, a_t, v_t in zip(*columns, v.to(dtype).unsqueeze(-2).unbind(1), strict=True):
        state = a_t * state + k_t * v_t
        outputs.append((q_t * state).sum(-2))
    return (scale * torch.stack(outputs, dim=1)).to(v.dtype)
