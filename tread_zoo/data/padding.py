"""Zeros around images that are too small for a patch size.

N images, C channels, H height, W width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_images(where: str, images: Tensor, pad_to: int | Sequence[int] | None) -> Tensor:
    """Return `images` [N,C,H,W] with zeros around them, centred, up to `pad_to`."""
    if pad_to is None:
        return images
    sides = (pad_to, pad_to) if isinstance(pad_to, int) else tuple(pad_to)
    height, width = images.shape[2:]
    if len(sides) != 2 or sides[0] < height or sides[1] < width:
        raise ValueError(
            f"data.pad_to={pad_to!r} does not fit: {where} has images of {height}x{width}; give "
            f"one side or [height, width], at least {height}x{width}."
        )
    top, left = (sides[0] - height) // 2, (sides[1] - width) // 2
    edges = (left, sides[1] - width - left, top, sides[0] - height - top)
    return torch.nn.functional.pad(images, edges)
