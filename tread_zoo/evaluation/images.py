"""Images to be compared, read batch by batch: an array, a part of a data set, a folder, an .npz.

Dimensions: N images, B of a batch, C channels, H height, W width.
"""

import functools
import logging
import math
import zipfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data import PIXELS, ImageData, read_items

logger = logging.getLogger(__name__)

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_GREY = ("1", "L", "I", "I;16", "LA")
_ALPHA = ("LA", "PA", "RGBA")


class Images(Protocol):
    """Images of one size, by number.

    name: for records. shape: C, H, W. num_classes: of their labels; 0: they have none.
    """

    name: str
    num_classes: int

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def __len__(self) -> int: ...

    def read(self, chosen: range) -> tuple[Tensor, Tensor | None]:
        """Return some images (step 1), uint8 [B,C,H,W] on the CPU, and their labels [B]."""


class TensorImages:
    """Images that lie in memory, uint8 [N,C,H,W]."""

    num_classes = 0

    def __init__(self, images: Tensor, name: str = "tensor"):
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            raise ValueError(
                f"images are {images.dtype} {list(images.shape)}; uint8 [N,C,H,W] with 1 or 3 "
                "channels is expected (tread_zoo.data.to_uint8 converts)."
            )
        self.images, self.name = images.cpu(), name
        self.shape: tuple[int, int, int] = tuple(images.shape[1:])  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, chosen: range) -> tuple[Tensor, Tensor | None]:
        """Return a slice of them."""
        return self.images[chosen.start : chosen.stop], None


class PartImages:
    """Images of a part of a data set, evenly spaced in it; latents are decoded.

    Args:
        data: the part's own.
        part: a data set of items as stored, and labels.
        name: for records.
        count: how many; None, or more than there are, takes all.
        device: where latents are decoded.
    """

    def __init__(
        self,
        data: ImageData,
        part: Dataset[Any],
        name: str,
        *,
        count: int | None = None,
        device: torch.device | None = None,
    ):
        self.data, self.part, self.name, self.codec = data, part, name, data.codec
        self.device, self.num_classes = device or torch.device("cpu"), data.num_classes
        self.chosen = evenly_spaced(len(part), count)  # type: ignore[arg-type]

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """C, H and W; of latents it is seen by decoding one."""
        return pixel_shape(self.data, self.device)

    def __len__(self) -> int:
        return len(self.chosen)

    @torch.no_grad()
    def read(self, chosen: range) -> tuple[Tensor, Tensor | None]:
        """Return some of them; another takes the place of one that cannot be read, as in training.
        The loader warns of it."""
        stored, labels = read_items(self.part, self.chosen[chosen.start : chosen.stop])
        if not isinstance(self.codec, type(PIXELS)):
            x = self.codec.to_model(stored, device=self.device)
            stored = self.codec.to_pixels(x, device=self.device)
        return stored, labels if self.num_classes else None


class FolderImages:
    """The pictures of a folder and of those in it, by name; grey if all of them are.

    Args:
        folder: of pictures of one size.
        class_names: sub-folders that have these names label what is in them.

    Raises:
        ValueError: no pictures, or of several sizes.
    """

    def __init__(self, folder: Path, class_names: tuple[str, ...] = ()):
        from PIL import Image

        files = sorted(path for path in folder.rglob("*") if path.is_file())
        self.files = [path for path in files if path.suffix.lower() in SUFFIXES]
        if not self.files:
            raise ValueError(f"{str(folder)!r} has no pictures ({', '.join(SUFFIXES)}).")
        others = [path.name for path in files if path not in set(self.files)]
        if others:
            logger.info("%s: %d other files, such as %s", folder, len(others), others[0])
        modes: set[str] = set()
        sizes: dict[str, Path] = {}
        for path in self.files:
            with Image.open(path) as picture:
                width, height = picture.size
                modes.add(picture.mode)
                sizes.setdefault(f"{width}x{height}", path)
        if len(sizes) > 1:
            (one, first), (other, second) = list(sizes.items())[:2]
            raise ValueError(
                f"{first} is {one} and {second} {other}: pictures of one size are compared. Resize "
                "them, or take out what is no sample."
            )
        if modes & set(_ALPHA):
            logger.warning("%s: alpha channels are dropped", folder)
        self.name = f"{folder.resolve().name}/"
        self.shape = (1 if modes <= set(_GREY) else 3, height, width)
        names = [path.relative_to(folder).parts[0] for path in self.files]
        labelled = bool(class_names) and set(names) <= set(class_names)
        self.num_classes = len(class_names) if labelled else 0
        self.labels = torch.tensor([class_names.index(n) for n in names]) if labelled else None

    def __len__(self) -> int:
        return len(self.files)

    def read(self, chosen: range) -> tuple[Tensor, Tensor | None]:
        """Return some of them; one that cannot be read is PIL's error, with its name."""
        from PIL import Image

        images = []
        for path in self.files[chosen.start : chosen.stop]:
            try:
                with Image.open(path) as picture:
                    pixels = np.asarray(picture.convert("L" if self.shape[0] == 1 else "RGB"))
            except OSError as error:
                raise OSError(f"{path}: {error}") from error
            images.append(torch.from_numpy(pixels.copy()).view(*self.shape[1:], -1))
        labels = None if self.labels is None else self.labels[chosen.start : chosen.stop]
        return _channels_first(torch.stack(images)), labels


class NpzImages:
    """The images of an .npz file as ADM's, read in order without unpacking all: `arr_0` uint8
    [N,H,W,C], and `arr_1`, labels [N], if it is there.

    Raises:
        ValueError: it has no such array.
    """

    def __init__(self, file: Path):
        self.file, self.name = file, file.name
        with np.load(file, allow_pickle=False) as archive:
            if "arr_0" not in archive.files:
                raise ValueError(f"{str(file)!r} has {', '.join(archive.files)}, and no arr_0.")
            labels = archive["arr_1"] if "arr_1" in archive.files else None
        self._stream: Any = zipfile.ZipFile(file).open("arr_0.npy")  # noqa: SIM115
        npy.read_magic(self._stream)
        shape, fortran, dtype = npy.read_array_header_1_0(self._stream)
        self._begin = self._stream.tell()
        if dtype != np.uint8 or fortran or len(shape) != 4 or shape[3] not in (1, 3):
            raise ValueError(
                f"{str(file)!r}: arr_0 is {dtype} {list(shape)}; uint8 [N,H,W,C] with 1 or 3 "
                "channels is expected."
            )
        self.count, height, width, channels = shape
        self.shape = (channels, height, width)
        self.labels = None
        if labels is not None and labels.dtype.kind in "iu" and labels.shape == (self.count,):
            self.labels = torch.from_numpy(labels.astype(np.int64))
        self.num_classes = 0 if self.labels is None else int(self.labels.max()) + 1

    def __len__(self) -> int:
        return self.count

    def read(self, chosen: range) -> tuple[Tensor, Tensor | None]:
        """Return some of them; going back begins the file again."""
        channels, height, width = self.shape
        size = math.prod(self.shape)
        self._stream.seek(self._begin + chosen.start * size)
        content = bytearray(self._stream.read(len(chosen) * size))
        images = torch.frombuffer(content, dtype=torch.uint8).view(-1, height, width, channels)
        labels = None if self.labels is None else self.labels[chosen.start : chosen.stop]
        return _channels_first(images), labels


def open_images(path: str | Path, class_names: tuple[str, ...] = ()) -> Images:
    """Return the images of a folder or an .npz file; little more than headers is read.

    Raises:
        ValueError: it is neither.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return FolderImages(place, class_names)
    if place.suffix == ".npz" and place.is_file():
        return NpzImages(place)
    raise ValueError(f"{str(path)!r} is neither a folder of pictures nor an .npz file with arr_0.")


def evenly_spaced(size: int, count: int | None) -> list[int]:
    """Return `count` indices, evenly spaced over 0 … size - 1; None or more than there are: all."""
    count = size if count is None else min(count, size)
    return [index * size // count for index in range(count)]


def pixel_shape(data: ImageData, device: torch.device) -> tuple[int, int, int]:
    """Return [C,H,W] of the images of a data set; for latents, one is decoded to see."""
    stored = (data.channels, *data.image_size)
    if isinstance(data.codec, type(PIXELS)):
        return stored
    one = torch.zeros(1, *stored, device=device)
    return tuple(data.codec.to_pixels(one, device=device).shape[1:])  # type: ignore[return-value]


def _channels_first(images: Tensor) -> Tensor:
    """Return [B,H,W,C] as [B,C,H,W] with the strides of that shape: of one channel they would stay
    the others', and a convolution would take another kernel, with other last bits."""
    batch, height, width, channels = images.shape
    return images.permute(0, 3, 1, 2).flatten().view(batch, channels, height, width)
