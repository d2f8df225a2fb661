"""One picture: from a file or its content to uint8 [C,H,W], resized and cropped."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import AfterValidator, PositiveInt
from torch import Tensor

from tread_zoo.data.folders import picture_formats

if TYPE_CHECKING:
    from PIL import Image


def _check_colour(name: str) -> str:
    from PIL import ImageColor

    try:
        ImageColor.getrgb(name)
    except ValueError as error:
        raise ValueError(f"data.background: {error}; give a name, as white, or '#rrggbb'") from None
    return name


Background = Annotated[str, AfterValidator(_check_colour)]  # a colour's name, or #rrggbb
Colour = tuple[int, int, int, int]
WHITE: Colour = (255, 255, 255, 255)
Size = tuple[PositiveInt, PositiveInt]  # H, W
Crop = Literal["center", "pad"]


def open_picture(
    source: str | bytes | Path, image_size: tuple[int, int] | None = None
) -> "Image.Image":
    """Return the picture in a file or in a file's content, turned upright as its EXIF data say.

    With `image_size` (H, W), a JPEG is decoded at a half, a quarter or an eighth of its size, as
    long as both sides stay at least max(H, W). This is much faster, and `resize_and_crop` then
    gives the same result within rounding.
    """
    from PIL import Image, ImageOps

    content = io.BytesIO(source) if isinstance(source, bytes) else source
    picture = Image.open(content, formats=picture_formats())
    if image_size is not None:
        picture.draft(None, (max(image_size), max(image_size)))  # it may lie on its side
    ImageOps.exif_transpose(picture, in_place=True)
    return picture


def read_picture(
    source: str | bytes | Path,
    image_size: tuple[int, int] | None,
    channels: int,
    background: Colour = WHITE,
    crop: Crop = "center",
) -> Tensor:
    """Return the picture in a file, or in a file's content, as uint8 [C,H,W], where C is
    `channels`: 1 (grey) or 3 (RGB). If `image_size` (H, W) is set, the picture is resized, then
    cropped or padded as `crop` says. Transparent pixels show `background`. Raises ValueError if the
    picture cannot be read."""
    from PIL import Image

    try:
        picture = open_picture(source, image_size)
        if picture.mode.startswith(("I", "F")):  # convert() would clip instead of scaling
            raise ValueError(f"{picture.mode!r} pixels, more than 8 bits per channel")
        if picture.has_transparency_data:  # before resizing, which mixes in invisible colours
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, background), picture)
        picture = picture.convert("L" if channels == 1 else "RGB")
        if image_size is not None:
            border = f"rgb{background[:3]}" if crop == "pad" else None  # grey in a grey picture
            picture = resize_and_crop(picture, image_size, border)
        pixels = torch.from_numpy(np.array(picture, dtype=np.uint8))
    except Exception as error:  # OSError, SyntaxError, struct.error, zlib.error and more
        place = "" if isinstance(source, bytes) else f" {source}"
        raise ValueError(f"the picture{place} cannot be read: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels).permute(2, 0, 1).contiguous()


def resize_and_crop(
    picture: "Image.Image", size: tuple[int, int], border: str | None = None
) -> "Image.Image":
    """Return `picture` resized to cover `size` (H, W) and cropped to its centre. If a colour
    `border` is given, the picture is instead resized to fit into `size` and framed in this colour.

    Square boxes of pixels are averaged first. Their side is the largest power of two that leaves
    the picture at least as large as wanted. Bicubic resizing follows. This avoids aliasing and
    blurs little. A smaller picture is enlarged.
    """
    from PIL import Image

    wanted, choose = size[::-1], max if border is None else min

    def scale_of(picture: Image.Image) -> float:
        return choose(w / p for p, w in zip(picture.size, wanted, strict=True))

    factor, scale = 1, scale_of(picture)
    width, height = (max(1, round(side * scale)) for side in picture.size)
    while scale <= 1 / (2 * factor):
        factor *= 2
    picture = picture.reduce(factor)
    if border is None:
        scale = scale_of(picture)
        width, height = (
            max(w, round(p * scale)) for p, w in zip(picture.size, wanted, strict=True)
        )
    whole = Image.new(picture.mode, wanted, border or 0)
    corner = int((wanted[0] - width) / 2), int((wanted[1] - height) / 2)
    whole.paste(picture.resize((width, height), Image.Resampling.BICUBIC), corner)
    return whole
