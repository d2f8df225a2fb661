"""torch's own fused attention, which never stores the N x N weights.

On a CPU it is the quicker one in float32. In half precision its backward pass is slow there:
forward and backward take 3.6 times as long as two matrix products at 64 tokens, 2 at 256, and as
long at about 2048.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

CPU_HALF_TOKENS = 1024


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention`."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def unsuited(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """Return why two matrix products are quicker, or None."""
    if q.device.type != "cpu" or k.shape[-2] > CPU_HALF_TOKENS:
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        return f"half precision on a CPU, at most {CPU_HALF_TOKENS} tokens"
    return None
