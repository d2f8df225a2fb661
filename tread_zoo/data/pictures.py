"""Picture files (PNG, JPEG, WebP …) to pixels.

C channels, H height, W width.
"""

import io
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

logger = logging.getLogger(__name__)

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_MODES = {1: "L", 3: "RGB"}  # Pillow's name of what so many channels hold
_SURVEYED = 64


def open_picture(source: str | bytes) -> "Image.Image":
    """Return the picture in a file or in its content, upright as its EXIF says, not yet decoded."""
    from PIL import Image, ImageOps

    opened = Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)
    ImageOps.exif_transpose(opened, in_place=True)
    return opened


def read_picture(source: str | bytes, image_size: int | None, channels: int) -> Tensor:
    """Return a picture as uint8 [C,H,W].

    Args:
        source: a path, or a file's content.
        image_size: resize and crop to this square; None leaves the size.
        channels: 1 (grey) or 3 (RGB).

    Raises:
        ValueError: it cannot be read.
    """
    try:
        image = open_picture(source)
        if image.mode.startswith(("I", "F")):  # convert() would clip it, not scale it
            raise ValueError(f"{image.mode!r} pixels, more than 8 bits a channel")
        if image.mode != _MODES[channels]:
            image = image.convert(_MODES[channels])
        if image_size is not None:
            image = resize_and_crop(image, image_size)
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    except Exception as error:  # of OSError, SyntaxError, struct.error, zlib.error and more
        raise ValueError(f"the picture cannot be read: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels).permute(2, 0, 1).contiguous()


def survey(
    read: Callable[[int], str | bytes], count: int, name: str, *, any_size: bool = False
) -> tuple[int, int] | None:
    """Return (H, W) of up to 64 evenly spaced pictures; transparency among them is logged.

    Those that cannot be opened are passed over: they are met again in training, and counted there.

    Args:
        read: path or content of picture i.
        count: how many pictures there are.
        name: of the data, for messages.
        any_size: they may differ in size; None is returned then.

    Raises:
        ValueError: none can be opened, or they differ in size.
    """
    sizes: dict[tuple[int, int], int] = {}
    transparent, reason = 0, ""
    for index in sorted({number * count // _SURVEYED for number in range(_SURVEYED)}):
        try:
            image = open_picture(read(index))
        except Exception as error:  # as above
            reason = str(error)
            continue
        sizes.setdefault((image.height, image.width), index)
        transparent += image.has_transparency_data
    if not sizes:
        raise ValueError(f"{name}: none of the pictures that were tried can be opened: {reason}")
    if transparent:
        logger.warning(
            "alpha     %s: some pictures (%d of the first ones looked at) have transparency, which "
            "is dropped: the colours beneath it are what is trained on", name, transparent,
        )  # fmt: skip
    if any_size:
        return None
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise ValueError(
            f"{name}: the pictures differ in size: number {first} is {one[0]}x{one[1]}, number "
            f"{second} is {other[0]}x{other[1]} (height x width). Set data.image_size to resize "
            "and crop them all to one square."
        )
    return next(iter(sizes))


def resize_and_crop(image: "Image.Image", size: int) -> "Image.Image":
    """Return `image` with its shorter side resized to `size`, centre-cropped to a square.

    Box averages by the largest power of two that leaves the shorter side at `size` or more, then
    bicubic: no aliasing, and little blur. A smaller picture is enlarged.
    """
    from PIL import Image

    factor = 1
    while min(image.size) >= 2 * factor * size:
        factor *= 2
    if factor > 1:
        image = image.reduce(factor)
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    if width == height:
        return image
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))
