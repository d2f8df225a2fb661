"""torch's own fused attention, which never stores the N x N weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_CROSSOVER = 512


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention`."""
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_unsuited(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why two matrix products are quicker, or None."""
    if q.device.type == "cpu" and k.shape[-2] < CPU_CROSSOVER:
        return f"{k.shape[-2]} tokens on a CPU, fewer than {CPU_CROSSOVER}"
    return None


def sdpa_limits(device: torch.device) -> str | None:
    """Return the rule of `sdpa_unsuited` in words."""
    return f"from {CPU_CROSSOVER} tokens" if device.type == "cpu" else None
