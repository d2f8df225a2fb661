"""Fused attention, which never stores the N x N weights: torch's own, and the package flash-attn.

On a CPU torch's kernel is faster than two matrix products in float32. In half precision its
backward pass is slow there: forward and backward take 3.6 times as long as two matrix products at
64 tokens, twice as long at 256, and equally long at about 2048.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tread_zoo.kernels.packages import LibraryFunction

CPU_HALF_TOKENS = 1024
# From torch 2.11 on, cuDNN's kernel is the first choice on an H100. Where the keys are 64 more than
# a multiple of 128, and all of a query's logits are far below 0, its gradient is NaN
# (pytorch/pytorch#196678). Torch's other kernels serve the same calls.
torch.backends.cuda.enable_cudnn_sdp(False)
FLASH = LibraryFunction(
    "flash_attn", "flash_attn_func", "pip install flash-attn --no-build-isolation"
)


def attention_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the result of `torch.nn.functional.scaled_dot_product_attention`."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def unsuited(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """Return why torch's kernel is slower than two matrix products for these arguments, or None."""
    if q.device.type != "cpu" or k.shape[-2] > CPU_HALF_TOKENS:
        return None
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else q.dtype
    if dtype in (torch.bfloat16, torch.float16):
        return f"half precision on a CPU, at most {CPU_HALF_TOKENS} tokens"
    return None


def attention_flash(q: Tensor, k: Tensor, v: Tensor, mask: None = None) -> Tensor:
    """Return the result of `flash_attn_func`, whose layout is [B, N, H, Dh]."""
    return FLASH(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def flash_unsuited(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """Return why the package's kernel cannot take these arguments, or None if it can."""
    if mask is not None:
        return "a mask, it takes none"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(q.dtype).removeprefix('torch.')}, it takes bfloat16 and float16"
    if q.shape[-1] % 8 or q.shape[-1] > 256:
        return f"heads of width {q.shape[-1]}, it takes multiples of 8 up to 256"
    return None
