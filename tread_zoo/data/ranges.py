"""Between stored bytes 0 … 255 and the range [-1, 1] that the models see."""

import torch
from torch import Tensor


def to_model_range(images: Tensor) -> Tensor:
    """Return uint8 `images` as float32 in [-1, 1]: x / 127.5 - 1."""
    if images.dtype != torch.uint8:
        raise ValueError(
            f"images has dtype {images.dtype}; to_model_range wants uint8 0 … 255 "
            "(anything else may have been scaled already)."
        )
    return images.to(torch.float32) / 127.5 - 1.0


def to_uint8(x: Tensor) -> Tensor:
    """Return `x`, meant to lie in [-1, 1], as uint8: clamped, then rounded to the nearest.

    The exact inverse of `to_model_range` for all 256 values. Raises ValueError on NaN, which
    has no nearest byte.
    """
    if torch.isnan(x).any():
        raise ValueError(
            f"x of shape {tuple(x.shape)} has NaN; no image can be made of it. "
            "Look at the loss of the run, or at the sampler's settings, that it came from."
        )
    return ((x.to(torch.float32).clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
