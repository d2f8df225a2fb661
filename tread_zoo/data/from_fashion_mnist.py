"""Fashion-MNIST: 60 000 + 10 000 grey images, 28x28, of 10 kinds of clothes.

Read from the four files that its authors publish, in the IDX format, by a reader of a few lines:

    2 zero bytes, a type (8: uint8), the number of axes; the length of each axis, 4 bytes, most
    significant first; the values in C order

N images, H height, W width.
"""

import gzip
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.download import RemoteFile, cache_folder, fetch
from tread_zoo.data.padding import pad_images
from tread_zoo.data.split import choose_num_classes, choose_parts
from tread_zoo.registry import register

_ROOT = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
FILES = tuple(
    RemoteFile(name, _ROOT + name, md5)
    for name, md5 in (
        ("train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        ("train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        ("t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        ("t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    )
)
CLASS_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip


@register("data", "fashion_mnist", num_steps=600)
def fashion_mnist(
    path: str | None = None,
    download: bool = True,
    pad_to: int | Sequence[int] | None = None,
    held_out: float | None = None,
    num_classes: int | None = None,
) -> ImageData:
    """Return Fashion-MNIST, held in memory.

    path: the folder of the four .gz files; None is a cache folder. One that torchvision made
      (with FashionMNIST/raw in it) will do.
    download: fetch files that are missing.
    pad_to: a side or (H, W); zeros are added around the centred image (32 suits patches of 4).
    held_out: None holds out the set's own test part; a fraction splits that much off the training
      part instead, and leaves the test part alone.
    num_classes: None for the 10; 0 drops the labels.

    Raises ValueError, naming the file or the field, for whatever is missing or damaged.
    """
    num_classes = choose_num_classes(num_classes, len(CLASS_NAMES))
    folder = cache_folder("fashion_mnist") if path is None else Path(path).expanduser()
    inner = folder / "FashionMNIST" / "raw"
    folder = inner if inner.is_dir() else folder
    fetch("fashion_mnist", FILES, folder, download=download)
    parts = []
    for images_file, labels_file in (FILES[:2], FILES[2:]):
        pixels = read_idx(folder / images_file.name, num_axes=3)
        labels = read_idx(folder / labels_file.name, num_axes=1)
        if len(pixels) != len(labels) or not len(labels) or labels.max() >= len(CLASS_NAMES):
            raise ValueError(
                f"{str(folder)!r}: {images_file.name} has {len(pixels)} images, "
                f"{labels_file.name} {len(labels)} labels; there must be one label from 0 to 9 an "
                "image. Remove both files, and they are downloaded again."
            )
        images = pad_images("fashion_mnist", torch.from_numpy(pixels).unsqueeze(1), pad_to)
        classes = torch.from_numpy(labels.astype(np.int64)) if num_classes else None
        parts.append(ArrayDataset(images, classes))
    train, test = choose_parts(parts[0], parts[1], held_out)
    return ImageData(
        name="fashion_mnist",
        train=train,
        held_out=test,
        image_size=(train.images.shape[2], train.images.shape[3]),
        channels=1,
        num_classes=num_classes,
        class_names=CLASS_NAMES[:num_classes],
    )


def read_idx(file: Path, *, num_axes: int) -> np.ndarray:
    """Return the uint8 array of a gzipped IDX file.

    Raises:
        ValueError: it is not one, is cut short, or has another number of axes.
    """
    try:
        content = gzip.decompress(file.read_bytes())
        zeros, kind, found = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{found}I", content, 4)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise ValueError(
            f"{str(file)!r} is no whole gzipped IDX file ({error}). Remove it, and it is "
            "downloaded again."
        ) from error
    start = 4 + 4 * found
    expected = int(np.prod(shape, dtype=np.int64))
    if (zeros, kind, found) != (0, 8, num_axes) or len(content) - start != expected:
        raise ValueError(
            f"{str(file)!r} has the header {content[:4].hex()}, shape {list(shape)} and "
            f"{len(content) - start} values; a file of {num_axes} axes of bytes is expected. "
            "Remove it, and it is downloaded again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape).copy()
