"""Picture files (PNG, JPEG, WebP …) to pixels, with whatever goes wrong named.

C channels, H height, W width.
"""

import io
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

MODES = {1: "L", 3: "RGB"}  # Pillow's name of what so many channels hold
_ORIENTATION = 0x0112  # the EXIF tag
_PNG_START = 8  # bytes of the signature, ahead of a PNG's first chunk
_EXIF_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")  # PNG's other places for it
_TURNED = (5, 6, 7, 8)  # its values that swap height and width


def check_picture_options(image_size: int | None, channels: int) -> None:
    """Raise `ValueError` for a data.image_size or data.channels that no picture can have."""
    if channels not in MODES:
        raise ValueError(f"data.channels={channels!r} must be 1 (grey) or 3 (RGB).")
    if image_size is not None and image_size < 1:
        raise ValueError(f"data.image_size={image_size!r} must be 1 or more pixels.")


def read_picture(
    source: str | bytes | BinaryIO, name: str, image_size: int | None, channels: int
) -> Tensor:
    """Return a picture as uint8 [C,H,W].

    Args:
        source: a path, an open file, or a file's content.
        name: what an error calls it.
        image_size: resize and crop to this square; None leaves the size.
        channels: 1 (grey) or 3 (RGB).

    Raises:
        ValueError: it cannot be read; the text has the name, the reason and what to do.
    """
    from PIL import ImageOps

    with naming(name), _open(source) as opened:
        ImageOps.exif_transpose(opened, in_place=True)  # without a copy of those that are upright
        image: Image.Image = opened
        if image.mode.startswith(("I", "F")):  # convert() would clip it, not scale it
            raise ValueError(f"{image.mode!r} pixels, more than 8 bits a channel")
        if image.mode != MODES[channels]:
            image = image.convert(MODES[channels])
        if image_size is not None:
            image = resize_and_crop(image, image_size)
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels.reshape(*pixels.shape[:2], channels).permute(2, 0, 1).contiguous()


def picture_size(source: str | bytes | BinaryIO, name: str) -> tuple[int, int]:
    """Return (H, W) of a picture as it is seen, from its header; raises as `read_picture` does."""
    with naming(name), _open(source) as image:
        width, height = image.size
        turned = width != height and _orientation(image) in _TURNED
    return (width, height) if turned else (height, width)


def picture_channels(source: str | bytes | BinaryIO, name: str) -> int:
    """Return 1 for a grey picture, else 3, from its header; raises as `read_picture` does."""
    with naming(name), _open(source) as image:
        mode = image.mode
    return 1 if mode in ("1", "L", "LA") else 3


def common_size(sources: Iterable[tuple[str, str | bytes]]) -> tuple[int, int]:
    """Return the (H, W) that all pictures share, read from their headers.

    sources: (name, path or content) of each; at least one.

    Raises:
        ValueError: two of them differ, or one cannot be read.
    """
    first: tuple[int, int] | None = None
    for name, source in sources:
        size = picture_size(source, name)
        if first is None:
            first, first_name = size, name
        if size != first:
            raise ValueError(
                f"the pictures differ in size: {first_name!r} is {first[0]}x{first[1]}, {name!r} "
                f"is {size[0]}x{size[1]} (height x width). Set data.image_size to resize and "
                "crop them all to one square."
            )
    assert first is not None
    return first


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


def _orientation(image: "Image.Image") -> int | None:
    """Return the EXIF orientation of a picture that was just opened, without decoding it.

    Pillow decodes a PNG to look for EXIF behind its pixels. Here the chunks behind them are looked
    through by their headers, and only a picture that has some there is decoded.
    """
    from PIL import Image

    if image.format != "PNG":
        return image.getexif().get(_ORIENTATION)
    if _has_exif_behind_pixels(image):
        image.load()
    return Image.Image.getexif(image).get(_ORIENTATION)  # PNG's own would decode


def _has_exif_behind_pixels(image: "Image.Image") -> bool:
    """Return whether a PNG has EXIF, or text that stands for it, behind its pixels.

    The file is left where it was. One that is cut short has nothing behind them.
    """
    file = image.fp  # type: ignore[attr-defined]
    place = file.tell()
    try:
        file.seek(_PNG_START)
        behind_pixels = False
        while len(header := file.read(8)) == 8:
            length, kind = int.from_bytes(header[:4], "big"), header[4:]
            behind_pixels = behind_pixels or kind == b"IDAT"
            end = file.tell() + length + 4  # a checksum follows
            if behind_pixels and (kind == b"eXIf" or _is_text_of_exif(kind, file)):
                return True
            file.seek(end)
        return False
    finally:
        file.seek(place)


def _is_text_of_exif(kind: bytes, file: "IO[bytes]") -> bool:
    """Return whether the PNG chunk whose content comes next in `file` is text that holds EXIF."""
    return kind.endswith(b"Xt") and file.read(len(_EXIF_TEXTS[0])).startswith(_EXIF_TEXTS)


def _open(source: str | bytes | BinaryIO) -> "Image.Image":
    from PIL import Image

    return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


class naming:
    """Turn whatever a picture's decoder raises into a ValueError that names the picture."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and more.
        if isinstance(error, Exception):
            raise ValueError(
                f"the picture {self.name!r} cannot be read ({error}). It may be cut short or of "
                "another kind than its name says: write it again as an 8-bit PNG or JPEG, or "
                "remove it."
            ) from error
