"""Images from a folder of picture files: one sub-folder a class, or a flat folder unlabelled.

C channels, H height, W width.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.dataset import ImageData
from tread_zoo.data.split import split_held_out

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_MODES = {1: "L", 3: "RGB"}
_ORIENTATION = 0x0112  # the EXIF tag
_TURNED = (5, 6, 7, 8)  # its values that swap height and width


def image_folder(
    path: str, image_size: int | None = None, channels: int = 3, held_out: float = 0.1
) -> ImageData:
    """Return the pictures under `path`, read from disk as they are asked for.

    path: with sub-folders, each is a class (in the order of their names) and all pictures under
      it, however deep, are in it; without, its pictures are unlabelled. Names that begin with a
      dot are left out.
    image_size: the shorter side is resized to it and the centre cropped, to a square. Not given,
      all pictures must have one size, which is checked here by reading every header.
    channels: 1 (grey) or 3 (RGB).
    held_out: the fraction split off, the same files in every run.
    """
    root = Path(path).expanduser()
    check_picture_options(image_size, channels)
    files, labels, class_names = _find_files(root)
    size = _common_size(files) if image_size is None else (image_size, image_size)
    kept, split_off = split_held_out(torch.tensor(labels), held_out)

    def subset(indices: Tensor) -> FileDataset:
        chosen = indices.tolist()
        return FileDataset(
            [files[i] for i in chosen], [labels[i] for i in chosen], image_size, channels
        )

    return ImageData(
        name=f"{root.name}/",  # never mistaken for a built-in source
        train=subset(kept),
        held_out=subset(split_off) if len(split_off) else None,
        image_size=size,
        channels=channels,
        num_classes=len(class_names),
        class_names=class_names,
    )


def check_picture_options(image_size: int | None, channels: int) -> None:
    """Raise ValueError for a size or a number of channels that pictures cannot have."""
    if channels not in _MODES:
        raise ValueError(f"data.channels={channels!r} must be 1 (grey) or 3 (RGB).")
    if image_size is not None and image_size < 1:
        raise ValueError(f"data.image_size={image_size!r} must be 1 or more pixels.")


class FileDataset(Dataset):
    """Picture files and their labels; see `image_folder` for `image_size` and `channels`."""

    def __init__(
        self, files: Sequence[str], labels: Sequence[int], image_size: int | None, channels: int
    ):
        self.files = list(files)
        self.labels = list(labels)
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image uint8 [C,H,W], label). Raises ValueError naming an unreadable file."""
        return self._read(self.files[index]), self.labels[index]

    def _read(self, file: str) -> Tensor:
        return read_picture(file, file, self.image_size, self.channels)


def read_picture(
    source: str | BinaryIO, name: str, image_size: int | None, channels: int
) -> Tensor:
    """Return a picture, uint8 [C,H,W]; see `image_folder` for `image_size` and `channels`.

    source: a path, or an open file.
    name: of the picture, for messages.

    Raises ValueError naming a picture that cannot be read.
    """
    from PIL import ImageOps

    with naming(name), _open(source) as opened:
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith(("I", "F")):  # convert() would clip it, not scale it
            raise ValueError(f"{image.mode!r} pixels, more than 8 bits a channel")
        image = image.convert(_MODES[channels])
    if image_size is not None:
        image = resize_and_crop(image, image_size)
    pixels = torch.from_numpy(np.array(image, dtype=np.uint8))
    return pixels.reshape(*pixels.shape[:2], channels).permute(2, 0, 1).contiguous()


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
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _find_files(root: Path) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Return files, their labels and the class names (none: unlabelled), in a fixed order."""
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise ValueError(
            f"data.path={str(root)!r} {what}; set data.path to a folder of pictures "
            f"({', '.join(SUFFIXES)})."
        )
    entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    folders = [entry for entry in entries if entry.is_dir()]
    loose = [str(entry) for entry in entries if entry.is_file() and _is_picture(entry.name)]
    if not folders and not loose:
        raise ValueError(
            f"data.path={str(root)!r} has no pictures ({', '.join(SUFFIXES)}), neither in it nor "
            "in sub-folders; set data.path to the folder that has them."
        )
    if folders and loose:
        raise ValueError(
            f"data.path={str(root)!r} has pictures beside sub-folders ({Path(loose[0]).name!r} "
            f"beside {folders[0].name!r}); sort them all into sub-folders, one a class, or put "
            "them all in one flat folder (unlabelled)."
        )
    if loose:
        return loose, [0] * len(loose), ()
    files: list[str] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        found = _pictures_under(folder)
        if not found:
            raise ValueError(
                f"data.path={str(root)!r}: the class folder {folder.name!r} has no pictures "
                f"({', '.join(SUFFIXES)}); fill it or remove it."
            )
        files += found
        labels += [label] * len(found)
    return files, labels, tuple(folder.name for folder in folders)


def _is_picture(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _pictures_under(folder: Path) -> list[str]:
    return sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if _is_picture(name)
    )


def _common_size(files: Sequence[str]) -> tuple[int, int]:
    """Return the (H, W) that all files share, read from their headers."""
    first = _header_size(files[0])
    for file in files[1:]:
        size = _header_size(file)
        if size != first:
            raise ValueError(
                f"the pictures differ in size: {files[0]!r} is {first[0]}x{first[1]}, {file!r} "
                f"is {size[0]}x{size[1]} (height x width). Set data.image_size to resize and "
                "crop them all to one square."
            )
    return first


def _header_size(file: str) -> tuple[int, int]:
    return picture_size(file, file)


def picture_size(source: str | BinaryIO, name: str) -> tuple[int, int]:
    """Return the (H, W) that a picture's header tells, turned as a camera was held."""
    with naming(name), _open(source) as image:
        width, height = image.size
        turned = image.getexif().get(_ORIENTATION) in _TURNED
    return (width, height) if turned else (height, width)


def _open(file: str | BinaryIO) -> "Image.Image":
    from PIL import Image

    return Image.open(file)


class naming:
    """Turn whatever a picture's decoder raises into a ValueError that names the file."""

    def __init__(self, file: str):
        self.file = file

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # Decoders raise OSError, SyntaxError, ValueError, struct.error, zlib.error and more.
        if isinstance(error, Exception):
            raise ValueError(
                f"the picture {self.file!r} cannot be read ({error}). It may be cut short or of "
                "another kind than its name says: write it again as an 8-bit PNG or JPEG, or "
                "remove it."
            ) from error
