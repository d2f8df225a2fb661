"""Images from one .npz file: N images, C channels, H height, W width.

Known sets of names, tried in this order:
  x_train, y_train, x_test, y_test   the test part is the held-out part
  images, labels
  arr_0, arr_1                       as ADM's sample files have them
The labels may be absent: the data are then unlabelled.
"""

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.padding import pad_images
from tread_zoo.data.split import split_held_out
from tread_zoo.registry import register

_KEY_SETS = (("x_train", "y_train"), ("images", "labels"), ("arr_0", "arr_1"))
_CHANNEL_COUNTS = (1, 3, 4)


@register("data", "npz")
def npz(
    path: str,
    images_key: str | None = None,
    labels_key: str | None = None,
    pad_to: int | Sequence[int] | None = None,
    held_out: float = 0.1,
    num_classes: int | None = None,
) -> ImageData:
    """Return the uint8 images of `path`, [N,H,W], [N,H,W,C] or [N,C,H,W], held in memory.

    images_key, labels_key: other names than the known ones; `images_key` alone means unlabelled.
    pad_to: a side or (H, W); zeros are added around the centred image.
    held_out: the fraction split off where the file has no test part of its own.
    num_classes: the largest label + 1 unless given; 0 drops the labels.

    Raises ValueError, naming the file and the array, for whatever does not fit this.
    """
    file = Path(path).expanduser()
    arrays = _read_arrays(file, images_key, labels_key)
    images = _as_images(file, *arrays["images"], pad_to)
    labels = _as_labels(file, *arrays["labels"], len(images)) if "labels" in arrays else None
    test_images = test_labels = None
    if "test_images" in arrays:
        test_images = _as_images(file, *arrays["test_images"], pad_to)
        if test_images.shape[1:] != images.shape[1:]:
            raise ValueError(
                f"data.path={str(file)!r}: 'x_train' has images [C,H,W] of "
                f"{tuple(images.shape[1:])}, 'x_test' of {tuple(test_images.shape[1:])}; "
                "store both at one size, or name one with data.images_key."
            )
        if labels is not None:
            test_labels = _as_labels(file, *arrays["test_labels"], len(test_images))

    labels, test_labels, num_classes = _check_classes(file, labels, test_labels, num_classes)
    train = ArrayDataset(images, labels)
    test: ArrayDataset | None
    if test_images is not None:
        test = ArrayDataset(test_images, test_labels)
    else:
        kept, split_off = split_held_out(train.labels, held_out)
        test = ArrayDataset(*train.gather(split_off)) if len(split_off) else None
        train = ArrayDataset(*train.gather(kept))
    return ImageData(
        name=file.name,  # with its suffix: never mistaken for a built-in source
        train=train,
        held_out=test,
        image_size=(images.shape[2], images.shape[3]),
        channels=images.shape[1],
        num_classes=num_classes,
        class_names=tuple(str(label) for label in range(num_classes)),
    )


def _read_arrays(
    file: Path, images_key: str | None, labels_key: str | None
) -> dict[str, tuple[str, np.ndarray]]:
    """Return role -> (name in the file, array); roles images, labels, test_images, test_labels."""
    if file.is_dir():
        raise ValueError(
            f"data.path={str(file)!r} is a folder; give an .npz file, or use "
            "data.name=image_folder for a folder of pictures."
        )
    if not file.exists():
        raise ValueError(f"data.path={str(file)!r} does not exist; set data.path to an .npz file.")
    try:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds one bare array")
        with archive:
            names = _choose_names(file, archive.files, images_key, labels_key)
            return {role: (name, archive[name]) for role, name in names.items()}
    except _MissingKey as error:
        raise ValueError(str(error)) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ValueError(
            f"data.path={str(file)!r} cannot be read as an .npz file of plain arrays ({error}). "
            "It may be cut short: copy or download it again; or write it anew with "
            "numpy.savez(path, images=images, labels=labels)."
        ) from error


class _MissingKey(Exception):
    """A name that the archive does not have; kept apart from what NumPy raises."""


def _choose_names(
    file: Path, present: Sequence[str], images_key: str | None, labels_key: str | None
) -> dict[str, str]:
    """Return role -> name in the file."""
    for field, key in (("images_key", images_key), ("labels_key", labels_key)):
        if key is not None and key not in present:
            raise _MissingKey(
                f"data.{field}={key!r} is not in {str(file)!r}; it has: {_listing(present)}."
            )
    if images_key is None:
        images_key, default_labels = next(
            (pair for pair in _KEY_SETS if pair[0] in present), (None, None)
        )
        if images_key is None:
            known = ", ".join(f"{images}/{labels}" for images, labels in _KEY_SETS)
            raise _MissingKey(
                f"data.path={str(file)!r} has none of the known names ({known}); it has: "
                f"{_listing(present)}. Set data.images_key (and data.labels_key)."
            )
        if labels_key is None and default_labels in present:
            labels_key = default_labels
    names = {"images": images_key}
    if labels_key is not None:
        names["labels"] = labels_key
    if images_key == "x_train" and "x_test" in present:
        names["test_images"] = "x_test"
        if labels_key is not None:
            if "y_test" not in present:
                raise _MissingKey(
                    f"data.path={str(file)!r} has labels for 'x_train' but no 'y_test' for "
                    f"'x_test'; it has: {_listing(present)}."
                )
            names["test_labels"] = "y_test"
    return names


def _listing(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _as_images(
    file: Path, key: str, array: np.ndarray, pad_to: int | Sequence[int] | None
) -> Tensor:
    """Return uint8 [N,C,H,W], padded."""
    where = f"data.path={str(file)!r}: {key!r}"
    if array.size == 0:
        raise ValueError(f"{where} of shape {array.shape} is empty; it must hold an image or more.")
    if array.dtype != np.uint8:
        raise ValueError(f"{where} {_describe_dtype(array)}")
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{where} has shape {array.shape}; images must be [N,H,W], [N,H,W,C] or [N,C,H,W]. "
            "Reshape them to one of these."
        )
    if array.ndim == 3:
        images = torch.from_numpy(array).unsqueeze(1)
    else:
        images = torch.from_numpy(array)
        first, last = (array.shape[axis] in _CHANNEL_COUNTS for axis in (1, 3))
        if first == last:
            which = "both of axes 1 and 3 could" if first else "neither axis 1 nor axis 3 can"
            raise ValueError(
                f"{where} has shape {array.shape}: {which} be the channels (1, 3 or 4 of them). "
                "Store the images as [N,H,W,C] or [N,C,H,W], larger than 4 pixels a side."
            )
        if last:
            images = images.permute(0, 3, 1, 2)
    return pad_images(where, images, pad_to).contiguous()


def _describe_dtype(array: np.ndarray) -> str:
    """Say which dtype and range an array has that is not uint8, and how to convert it."""
    if array.dtype.kind not in "fiub":
        return f"has dtype {array.dtype}; images must be numbers, uint8 0 … 255."
    low, high = float(array.min()), float(array.max())
    if array.dtype.kind in "iu" and low >= 0 and high <= 255:
        remedy = "x.astype(numpy.uint8)"
    elif low >= 0 and high <= 1:
        remedy = "(x * 255).round().astype(numpy.uint8)"
    elif low >= -1 and high <= 1:
        remedy = "((x + 1) * 127.5).round().astype(numpy.uint8)"
    else:
        remedy = "x.clip(0, 255).round().astype(numpy.uint8), scaled as fits your values"
    return (
        f"has dtype {array.dtype} with values from {low:g} to {high:g}; images must be uint8 "
        f"0 … 255. Convert them once, with {remedy}, and save the file again."
    )


def _as_labels(file: Path, key: str, array: np.ndarray, num_images: int) -> Tensor:
    """Return int64 [N]."""
    where = f"data.path={str(file)!r}: {key!r}"
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.shape != (num_images,):
        raise ValueError(
            f"{where} has shape {array.shape} for {num_images} images; there must be one whole "
            f"number an image, [{num_images}]."
        )
    if array.dtype.kind not in "iu":
        raise ValueError(
            f"{where} has dtype {array.dtype}; labels must be whole numbers from 0 on. "
            "Save them with .astype(numpy.int64) (one-hot rows: .argmax(1))."
        )
    if array.min() < 0:
        raise ValueError(
            f"{where} has the label {array.min()}; labels must be 0 or more. For images without "
            "a class, leave the labels out, or set data.num_classes=0."
        )
    return torch.from_numpy(array.astype(np.int64))


def _check_classes(
    file: Path, labels: Tensor | None, test_labels: Tensor | None, num_classes: int | None
) -> tuple[Tensor | None, Tensor | None, int]:
    """Return the labels of both parts (None where they are not used) and the number of classes."""
    if num_classes is not None and num_classes < 0:
        raise ValueError(f"data.num_classes={num_classes} must be 0 (no labels) or more.")
    if labels is None and num_classes:
        raise ValueError(
            f"data.num_classes={num_classes}, but data.path={str(file)!r} has no labels; add "
            "them to the file, set data.labels_key, or set data.num_classes=0."
        )
    if labels is None or num_classes == 0:
        return None, None, 0
    largest = max(int(part.max()) for part in (labels, test_labels) if part is not None)
    if num_classes is not None and largest >= num_classes:
        raise ValueError(
            f"data.num_classes={num_classes}, but data.path={str(file)!r} has the label "
            f"{largest}; labels must lie in 0 … {num_classes - 1}. Use at least {largest + 1}."
        )
    return labels, test_labels, largest + 1 if num_classes is None else num_classes
