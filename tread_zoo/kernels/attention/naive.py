"""Attention by its formula, in the dtype of the inputs.

y_i = Σ_j softmax_j(q_i · k_j / √Dh) v_j over every key j that query i may see.
"""

import torch
from torch import Tensor


def attention_naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return attention by its formula; see `tread_zoo.kernels.attention`."""
    scores = torch.einsum("bhid,bhjd->bhij", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bhid", weights, v)
