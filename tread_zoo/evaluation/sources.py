"""Where real images come from: an array, a part of a data set, an .npz file; read batch by batch.

No source is held in memory by this module. The hash of a source is the sha256 of its shape and of
the sha256 of each image's bytes, in their order: it depends neither on the batch size nor on what
the images are stored in, so a folder of PNG files and an .npz of the same pixels have the same.

Dimensions: N images, B of a batch, C channels, H height, W width.
"""

import hashlib
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data import ArrayDataset, ImageData
from tread_zoo.data.codec import PixelCodec
from tread_zoo.data.loader import CorruptItem, read_items, warn_of

ADM_IMAGES = "arr_0"  # uint8 [N,H,W,C], as the sample files of ADM's evaluator have them


class ImageSource(Protocol):
    """Images of one size, by number."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """C, H and W."""

    def __len__(self) -> int: ...

    def read(self, chosen: range) -> Tensor:
        """Return images `chosen` (step 1) as uint8 [B,C,H,W] on the CPU."""


class TensorImages:
    """Images that lie in memory, uint8 [N,C,H,W]."""

    def __init__(self, images: Tensor):
        self.images = images.cpu()
        self.shape: tuple[int, int, int] = tuple(images.shape[1:])  # type: ignore[assignment]

    def __len__(self) -> int:
        return len(self.images)

    def read(self, chosen: range) -> Tensor:
        """Return a slice of them."""
        return self.images[chosen.start : chosen.stop]


class PartImages:
    """Images of a part of a data set, evenly spaced in it; latents are decoded.

    Args:
        data: the part's own.
        part: items as stored, and labels.
        shape: [C,H,W] of the images.
        count: how many; None, or more than there are, takes all.
        device: where latents are decoded.
        replace: in place of items that cannot be read take others, as training does, and note
            their numbers in `replaced`; otherwise they are an error.
    """

    def __init__(
        self,
        data: ImageData,
        part: Dataset,
        shape: tuple[int, int, int],
        count: int | None = None,
        device: torch.device | None = None,
        *,
        replace: bool = False,
    ):
        self.part, self.shape, self.codec = part, shape, data.codec
        self.replace, self.replaced = replace, set[int]()
        self.device = device or torch.device("cpu")
        self.chosen = spread(len(part), count)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.chosen)

    @torch.no_grad()
    def read(self, chosen: range) -> Tensor:
        """Return some of the images.

        Raises:
            ValueError: one cannot be read, and nothing may replace it.
        """
        indices = self.chosen[chosen.start : chosen.stop]
        if isinstance(self.part, ArrayDataset):
            stored = self.part.images[indices]
        else:
            on_corrupt = self._note if self.replace else _refuse
            stored, _ = read_items(self.part, indices, on_corrupt=on_corrupt)
        if isinstance(self.codec, PixelCodec):
            return stored
        x = self.codec.to_model(stored, device=self.device)
        return self.codec.to_pixels(x, device=self.device)

    def _note(self, item: CorruptItem) -> None:
        if item.index not in self.replaced:
            warn_of(item)
        self.replaced.add(item.index)


def _refuse(item: CorruptItem) -> None:
    raise ValueError(
        f"{item.name} cannot be read ({item.reason.splitlines()[0]}), and no other image may take "
        "its place among those that are compared with. Convert or replace it, or take it out."
    )


def spread(size: int, count: int | None) -> list[int]:
    """Return `count` indices, evenly spaced over 0 … size - 1; None or more than there are: all."""
    count = size if count is None else min(count, size)
    return [index * size // count for index in range(count)]


def pixel_shape(data: ImageData, device: torch.device) -> tuple[int, int, int]:
    """Return [C,H,W] of the images of a data set; for latents, one is decoded to see."""
    stored = (data.channels, *data.image_size)
    if isinstance(data.codec, PixelCodec):
        return stored
    one = torch.zeros(1, *stored, device=device)
    return tuple(data.codec.to_pixels(one, device=device).shape[1:])  # type: ignore[return-value]


def labels_of(part: Dataset, count: int | None = None) -> Tensor:
    """Return the labels int64 [N] of the images that `PartImages` takes; a part that does not list
    them is read through."""
    labels = getattr(part, "labels", None)
    if labels is None:
        labels = [part[index][1] for index in range(len(part))]  # type: ignore[arg-type]
    return torch.as_tensor(labels)[spread(len(part), count)]  # type: ignore[arg-type]


class NpzImages:
    """The images `arr_0` of an .npz file, uint8 [N,H,W,C], read in order without unpacking all.

    Args:
        file: the .npz.
        field: how errors name it.

    Raises:
        ValueError: the array is of another kind, or the file is cut short.
    """

    def __init__(self, file: Path, field: str = "evaluation.reference"):
        self.file, self.field = file, field
        self._stream: Any = None
        try:
            shape, fortran, kind, self._begin = npy_header(file, ADM_IMAGES)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise ValueError(self._damaged(str(error))) from error
        if kind != np.uint8 or fortran or len(shape) != 4 or shape[3] not in (1, 3) or not shape[0]:
            raise ValueError(
                f"{field}={str(file)!r}: {ADM_IMAGES!r} is {kind} {list(shape)}; "
                "images are wanted as uint8 [N,H,W,C] with 1 or 3 channels."
            )
        self.count, height, width, channels = shape
        self.shape = (channels, height, width)

    def __len__(self) -> int:
        return self.count

    def read(self, chosen: range) -> Tensor:
        """Return some images; going back begins the file again."""
        size = math.prod(self.shape)
        try:
            if self._stream is None:
                self._stream = self._open()
            self._stream.seek(self._begin + chosen.start * size)
            found = self._stream.read(len(chosen) * size)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise ValueError(self._damaged(str(error))) from error
        if len(found) != len(chosen) * size:
            raise ValueError(self._damaged(f"image {chosen.start} is cut short"))
        channels, height, width = self.shape
        images = torch.frombuffer(bytearray(found), dtype=torch.uint8)
        images = images.view(-1, height, width, channels).permute(0, 3, 1, 2)
        # Flattened on the way: of one channel, the strides would stay those of [N,H,W,C], and a
        # convolution would take another kernel, with other last bits.
        return images.flatten().view(-1, *self.shape)

    def _open(self) -> Any:
        return zipfile.ZipFile(self.file).open(f"{ADM_IMAGES}.npy")

    def _damaged(self, why: str) -> str:
        return f"{self.field}={str(self.file)!r} is damaged ({why}); copy or download it again."


def npy_header(file: Path, name: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Return shape, whether it lies in Fortran's order, dtype and first byte of an array of an .npz
    file, which is not unpacked."""
    with zipfile.ZipFile(file) as archive, archive.open(f"{name}.npy") as stream:
        old = npy.read_magic(stream) == (1, 0)
        read = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
        return *read(stream), stream.tell()


def read_ahead(
    source: ImageSource, batches: Iterable[range], *, hashed: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images uint8 [B,C,H,W] and their digests uint8 [B,32] ([B,0] if not `hashed`).

    The next batch is read and hashed by another thread while the last one is being used.
    """

    def work(chosen: range) -> tuple[Tensor, Tensor]:
        images = source.read(chosen)
        return images, digests(images) if hashed else torch.empty(len(chosen), 0).byte()

    with ThreadPoolExecutor(max_workers=1) as reader:
        upcoming = None
        for chosen in batches:
            following = reader.submit(work, chosen)
            if upcoming is not None:
                yield upcoming.result()
            upcoming = following
        if upcoming is not None:
            yield upcoming.result()


def digests(images: Tensor) -> Tensor:
    """Return the sha256 of each image's bytes, uint8 [B,32]."""
    found = [hashlib.sha256(image).digest() for image in images.contiguous().numpy()]
    return torch.frombuffer(bytearray(b"".join(found)), dtype=torch.uint8).view(-1, 32)


def combine(shape: tuple[int, ...], parts: Tensor) -> str:
    """Return the hash of a source from its shape [C,H,W] and its images' digests [N,32]."""
    head = "x".join(map(str, shape)).encode()
    return hashlib.sha256(head + parts.contiguous().numpy().tobytes()).hexdigest()


def source_sha256(source: ImageSource, batch_size: int) -> str:
    """Return the hash of a source; all of it is read."""
    whole = range(len(source))
    batches = (whole[first : first + batch_size] for first in range(0, len(source), batch_size))
    return combine(source.shape, torch.cat([part for _, part in read_ahead(source, batches)]))
