"""CIFAR-10: 50 000 + 10 000 colour images, 32x32, of 10 classes.

The *binary* version is what is downloaded and read: records of 1 label byte and 3072 pixel bytes,
red, green, blue plane, each in raster order. The better-known Python version is made of pickles,
which can run code when they are opened; this has nothing to run.
"""

import tarfile
import zlib
from pathlib import Path

import numpy as np
import torch

from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.download import RemoteFile, cache_folder, fetch
from tread_zoo.data.split import choose_num_classes, choose_parts
from tread_zoo.registry import register

ARCHIVE = RemoteFile(
    "cifar-10-binary.tar.gz",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "c32a1d4ab5d03f1284b67883e8d87530",
)
FOLDER = "cifar-10-batches-bin"  # inside the archive
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
CLASS_NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32  # bytes


@register("data", "cifar10", num_steps=400)
def cifar10(
    path: str | None = None,
    download: bool = True,
    held_out: float | None = None,
    num_classes: int | None = None,
) -> ImageData:
    """Return CIFAR-10, held in memory.

    path: the folder of cifar-10-binary.tar.gz, or of what it unpacks to, which starts a little
      faster; None is a cache folder.
    download: fetch the archive if it is missing.
    held_out: None holds out the set's own test part; a fraction splits that much off the training
      part instead, and leaves the test part alone.
    num_classes: None for the 10; 0 drops the labels.

    Raises ValueError, naming the file or the field, for whatever is missing or damaged.
    """
    num_classes = choose_num_classes(num_classes, len(CLASS_NAMES))
    folder = cache_folder("cifar10") if path is None else Path(path).expanduser()
    unpacked = next((f for f in (folder, folder / FOLDER) if (f / TEST_FILES[0]).exists()), None)
    if unpacked is None:
        fetch("cifar10", [ARCHIVE], folder, download=download)
        contents = _read_archive(folder / ARCHIVE.name)
    else:
        contents = _read_folder(unpacked)
    train, test = (
        _as_images([contents[name] for name in names], folder, labelled=bool(num_classes))
        for names in (TRAIN_FILES, TEST_FILES)
    )
    train, held_out_part = choose_parts(train, test, held_out)
    return ImageData(
        name="cifar10",
        train=train,
        held_out=held_out_part,
        image_size=_SHAPE[1:],
        channels=_SHAPE[0],
        num_classes=num_classes,
        class_names=CLASS_NAMES[:num_classes],
    )


def _read_archive(file: Path) -> dict[str, bytes]:
    """Return the six files by name, straight from the archive: nothing is unpacked to the disk."""
    contents = {}
    try:
        with tarfile.open(file) as archive:
            for name in (*TRAIN_FILES, *TEST_FILES):
                member = archive.extractfile(f"{FOLDER}/{name}")
                if member is None:
                    raise KeyError(f"{name} is no file")
                contents[name] = member.read()
    except (OSError, EOFError, KeyError, tarfile.TarError, zlib.error) as error:
        raise ValueError(
            f"{str(file)!r} is not the whole of CIFAR-10's binary version ({error}). Remove it, "
            "and it is downloaded again."
        ) from error
    return contents


def _read_folder(folder: Path) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in (*TRAIN_FILES, *TEST_FILES)}
    except OSError as error:
        raise ValueError(
            f"data.path={str(folder)!r}: {error}. It needs {', '.join(TRAIN_FILES)} and "
            f"{TEST_FILES[0]}: unpack {ARCHIVE.name} there again, or remove what is there."
        ) from error


def _as_images(contents: list[bytes], folder: Path, *, labelled: bool) -> ArrayDataset:
    for content in contents:
        if not content or len(content) % _RECORD:
            raise ValueError(
                f"data.path={str(folder)!r} has a file of {len(content)} bytes, which are no whole "
                f"records of {_RECORD}: it is cut short, or not CIFAR-10's binary version. Remove "
                "it, and it is downloaded again."
            )
    records = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, _RECORD)
    labels = torch.from_numpy(records[:, 0].astype(np.int64))
    if int(labels.max()) >= len(CLASS_NAMES):
        raise ValueError(
            f"data.path={str(folder)!r} has the label {int(labels.max())}; CIFAR-10 has 0 … 9. "
            "Its files are damaged, or CIFAR-100's: remove them, and they are downloaded again."
        )
    images = torch.from_numpy(records[:, 1:].reshape(-1, *_SHAPE).copy())
    return ArrayDataset(images, labels if labelled else None)
