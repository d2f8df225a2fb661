"""Attention as two matrix products and a softmax: fast where N x N is small."""

import torch
from torch import Tensor


def attention_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return softmax((q Dh^-½) kᵀ) v. Scaling q instead of q kᵀ takes N·Dh products, not N·N."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.matmul(torch.softmax(scores, dim=-1), v)
