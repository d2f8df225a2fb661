"""Images to score, read batch by batch from a tensor, a data set, a folder or an .npz file.

Dimensions: N images, B images in a batch, C channels, H height, W width.
"""

import logging
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data import ImageData, read_items
from tread_zoo.data.files import open_npz
from tread_zoo.data.folders import picture_files, picture_formats
from tread_zoo.data.labels import read_labels
from tread_zoo.data.pictures import read_picture
from tread_zoo.data.split import evenly_spaced

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Images:
    """Images of one size, which are read in batches.

    Args:
        name: name for records.
        shape: C, H, W.
        count: N.
        read: a function of a range of indices with step 1. It returns these images, uint8 [B,C,H,W]
            on the CPU, and their labels [B] or None.
        num_classes: number of classes; 0 without labels.
    """

    name: str
    shape: tuple[int, ...]
    count: int
    read: Callable[[range], tuple[Tensor, Tensor | None]]
    num_classes: int = 0

    def __len__(self) -> int:
        return self.count


def open_images(images: "Images | Tensor | str | Path", field: str = "samples") -> Images:
    """Return a tensor, a folder of pictures or an .npz file as `Images`; errors name the setting
    `field`. Only headers of files are read. Raises ValueError for images that are not uint8 or
    differ in size."""
    if isinstance(images, Images):
        return images
    if isinstance(images, Tensor):
        return _from_tensor(images)
    path = Path(images).expanduser()
    return _open_folder(path, field) if path.is_dir() else _open_npz(path, field)


def _from_tensor(images: Tensor) -> Images:
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}, not uint8 [N,1 or 3,H,W]: "
            "tread_zoo.data.to_uint8 converts."
        )
    stored, shape = images.cpu(), tuple(images.shape[1:])
    return Images("tensor", shape, len(images), lambda rows: (stored[rows.start : rows.stop], None))


def part_images(
    data: ImageData,
    part: Dataset[Any],
    name: str,
    *,
    count: int | None = None,
    device: torch.device | None = None,
) -> Images:
    """Return `count` evenly spaced images (None: all) of `part`, a split of `data`; `name` is the
    split's name for records. Latents are decoded on `device`, by default the CPU. Corrupt items are
    replaced by others, as in training."""
    place, codec = device or torch.device("cpu"), data.codec
    numbers = evenly_spaced(len(part), count)  # type: ignore[arg-type]

    @torch.no_grad()
    def read(rows: range) -> tuple[Tensor, Tensor | None]:
        images, labels = read_items(part, numbers[rows.start : rows.stop])
        if codec.decoded_by:
            images = codec.to_pixels(codec.to_model(images, device=place), device=place)
        return images, labels if data.num_classes else None

    return Images(name, pixel_shape(data, place), len(numbers), read, data.num_classes)


def _open_folder(folder: Path, field: str) -> Images:
    """Return the pictures of a folder and its sub-folders, sorted by name. Transparency becomes
    white; the images have one channel if all are grey. Raises ValueError if the pictures differ in
    size or there are none; the latter error names `field`, the setting with the folder."""
    from PIL import ExifTags, Image

    files = sorted(picture_files(folder, field))
    sizes: dict[tuple[int, int], Path] = {}
    channels, transparent = 1, 0
    for path in files:
        with Image.open(path, formats=picture_formats()) as picture:
            exif = picture.getexif() if "exif" in picture.info else {}  # else decodes all of a PNG
            turned = exif.get(ExifTags.Base.Orientation, 1) >= 5  # sideways; `read` turns it
            sizes.setdefault(picture.size if turned else picture.size[::-1], path)
            channels = 1 if channels == 1 and picture.mode in ("1", "L", "LA") else 3
            transparent += picture.has_transparency_data
    if len(sizes) > 1:
        two = [f"{path} is {high}x{wide}" for (high, wide), path in list(sizes.items())[:2]]
        raise ValueError(f"{' and '.join(two)} (height x width): all pictures must have one size.")
    if transparent:
        logger.warning("alpha     %s: %d pictures have transparency, on white", folder, transparent)

    def read(rows: range) -> tuple[Tensor, None]:
        chosen = files[rows.start : rows.stop]
        return torch.stack([read_picture(path, None, channels) for path in chosen]), None

    name, shape = f"{folder.resolve().name}/", (channels, *next(iter(sizes)))
    return Images(name, shape, len(files), read)


def _open_npz(file: Path, field: str) -> Images:
    """Return the images of an .npz file in ADM's format: `arr_0` uint8 [N,H,W,C] and perhaps labels
    `arr_1` [N]. The file is never unpacked as a whole. Errors name `field`, the setting with the
    file."""
    where = f"{field}={str(file)!r}"
    with open_npz(file, field) as archive:
        if "arr_0" not in archive.files:
            raise ValueError(
                f"{where} has {', '.join(archive.files) or 'no arrays'}, but needs images as "
                "arr_0, uint8 [N,H,W,C]: numpy.savez(file, arr_0=images)."
            )
        values = archive["arr_1"] if "arr_1" in archive.files else None
    stream: Any = zipfile.ZipFile(file).open("arr_0.npy")  # noqa: SIM115
    npy.read_magic(stream)
    shape, fortran, dtype = npy.read_array_header_1_0(stream)
    begin = stream.tell()
    if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] not in (1, 3):
        raise ValueError(f"{where}: arr_0 is {dtype} {list(shape)}, not uint8 [N,H,W,1 or 3].")
    if not shape[0]:
        raise ValueError(f"{where}: arr_0 is {list(shape)}: it has no images.")
    count, height, width, channels = shape
    labels = None if values is None else _sample_labels(values, count, f"{where}: arr_1")

    def read(rows: range) -> tuple[Tensor, Tensor | None]:
        size = math.prod(shape[1:])
        stream.seek(begin + rows.start * size)  # seeking back reads from the start
        content = bytearray(stream.read(len(rows) * size))
        images = torch.frombuffer(content, dtype=torch.uint8).view(-1, height, width, channels)
        # contiguous: with other strides, convolutions choose other kernels and round differently
        images = images.permute(0, 3, 1, 2).flatten().view(-1, channels, height, width)
        return images, None if labels is None else labels[rows.start : rows.stop]

    num_classes = 0 if labels is None else int(labels.max()) + 1
    return Images(file.name, (channels, height, width), count, read, num_classes)


def _sample_labels(values: np.ndarray, count: int, where: str) -> Tensor:
    """Return class labels int64 [count] from the array `values`. Raises ValueError if these are not
    `count` class numbers 0, 1, …; the error names the array by `where`."""
    labels, names = read_labels(values, where)
    if names or len(labels) != count or int(labels.min()) < 0:
        raise ValueError(
            f"{where} is {values.dtype} {list(values.shape)}, but labels are the number of a "
            f"class, 0, 1, …, for each of {count} images. Store them so, or leave arr_1 out."
        )
    return labels


def pixel_shape(data: ImageData, device: torch.device) -> tuple[int, ...]:
    """Return [C,H,W] of a data set's images. For latents, one is decoded on `device` to find
    out."""
    stored = (data.channels, *data.image_size)
    if not data.codec.decoded_by:
        return stored
    one = torch.zeros(1, *stored, device=device)
    return tuple(data.codec.to_pixels(one, device=device).shape[1:])
