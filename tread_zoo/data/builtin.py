"""Data sets in memory: digits, an .npz file, Fashion-MNIST, CIFAR-10.

N images, C channels, H height, W width.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from tread_zoo.data.dataset import ArrayDataset, ImageData
from tread_zoo.data.files import cache_folder, open_npz
from tread_zoo.data.labels import check_labels, read_labels
from tread_zoo.data.split import split_data
from tread_zoo.fields import Fraction
from tread_zoo.registry import register

Side = PositiveInt | tuple[PositiveInt, PositiveInt] | None
_KEYS = (("x_train", "y_train"), ("images", "labels"), ("arr_0", "arr_1"))  # the last pair is ADM's


@register("data", "digits", num_steps=800)
def digits(held_out: Fraction = 0.2) -> ImageData:
    """Return scikit-learn's 1797 digits, 8x8 grey, 10 classes.

    The values 0 … 16 are stored as round(v * 255 / 16). Source: the test part of E. Alpaydin and
    C. Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998, CC BY 4.0).

    Args:
        held_out: fraction held out, the same images in every run.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        values, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"]).long()
    images = (values.double() * (255 / 16)).round().to(torch.uint8).unsqueeze(1)
    return _in_memory("digits", [(images, labels)], held_out, 10)


@register("data", "npz")
def npz(
    path: str,
    pad_to: Side = None,
    held_out: Fraction = 0.1,
    num_classes: NonNegativeInt | None = None,
) -> ImageData:
    """Return the uint8 images of an .npz file, [N,H,W], [N,H,W,C] or [N,C,H,W].

    Images and labels are the arrays `x_train` and `y_train`, or `images` and `labels`, or `arr_0`
    and `arr_1`. The arrays `x_test` and `y_test` beside `x_train`, if they exist, are held out.
    Labels are optional, and may be integers or words.

    Args:
        path: the .npz file.
        pad_to: side of the images after padding with zeros on all sides, or [H,W]; null does not
            pad.
        held_out: fraction held out if the file has no `x_test`.
        num_classes: number of classes; 0 drops the labels. null counts the words among the labels;
            for integers, it is the largest label + 1.
    """
    file = Path(path).expanduser()
    with open_npz(file, "data.path") as archive:
        arrays = dict(archive.items())
    x, y = next((pair for pair in _KEYS if pair[0] in arrays), ("", ""))
    if not x:
        raise ValueError(
            f"data.path={path!r} has the arrays {', '.join(arrays)}, but none of "
            f"{', '.join(name for name, _ in _KEYS)}: save them under these names."
        )
    keys = [(x, y), ("x_test", "y_test")] if x == "x_train" and "x_test" in arrays else [(x, y)]
    labelled = y in arrays and num_classes != 0
    if num_classes and not labelled:
        raise ValueError(f"data.num_classes={num_classes}, but data.path={path!r} has no labels.")
    images = [_as_images(arrays[x], f"data.path={path!r}: {x!r}") for x, _ in keys]
    labels: list[Tensor | None] = [None] * len(keys)
    names = tuple[str, ...]()
    if labelled:
        for x, y in keys:
            if len(arrays[x]) != len(arrays.get(y, ())):
                raise ValueError(
                    f"data.path={path!r} has {len(arrays[x])} images in {x!r} and "
                    f"{len(arrays.get(y, ()))} labels in {y!r}: give each image one, or set "
                    "data.num_classes=0."
                )
        given = np.concatenate([arrays[y] for _, y in keys])
        found, names = read_labels(given, f"data.path={path!r}: {y!r}")
        labels = list(found.split([len(part) for part in images]))
    parts = list(zip(images, labels, strict=True))
    split = None if len(parts) > 1 else held_out
    return _in_memory(file.name, parts, split, num_classes, pad_to=pad_to, class_names=names)


@register("data", "fashion_mnist", num_steps=600)
def fashion_mnist(
    path: str | None = None,
    pad_to: Side = None,
    held_out: Fraction | None = None,
    num_classes: NonNegativeInt | None = None,
) -> ImageData:
    """Return Fashion-MNIST, 28x28 grey, 10 classes, read by torchvision.

    Args:
        path: the folder that has torchvision's FashionMNIST/raw; null downloads 30 MB once, to a
            cache folder.
        pad_to: side of the images after padding with zeros on all sides, or [H,W]; null does not
            pad; 32 suits patches of 4.
        held_out: null holds out the test part. A fraction is held out of the training part; the
            test part is then not used.
        num_classes: 0 drops the labels.
    """
    from torchvision.datasets import FashionMNIST

    return _from_torchvision(FashionMNIST, "fashion_mnist", path, held_out, num_classes, pad_to)


@register("data", "cifar10", num_steps=400)
def cifar10(
    path: str | None = None,
    held_out: Fraction | None = None,
    num_classes: NonNegativeInt | None = None,
) -> ImageData:
    """Return CIFAR-10, 32x32 colour, 10 classes, read by torchvision, which unpickles only files
    with the published MD5.

    Args:
        path: the folder that has cifar-10-batches-py; null downloads 170 MB once, to a cache
            folder.
        held_out, num_classes: see `fashion_mnist`.
    """
    from torchvision.datasets import CIFAR10

    return _from_torchvision(CIFAR10, "cifar10", path, held_out, num_classes)


def _from_torchvision(
    kind: Any,
    name: str,
    path: str | None,
    held_out: float | None,
    num_classes: int | None,
    pad_to: Any = None,
) -> ImageData:
    """Return the training and test images of `kind`, a data set class of torchvision, as
    `ImageData` with the name `name`. For the other arguments see `fashion_mnist`."""
    root = Path(path or cache_folder() / name).expanduser()
    if path is None:
        root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".download.lock") if path is None else nullcontext():
        sets = [kind(root, train=train, download=path is None) for train in (True, False)]
    parts = [(_channels_first(torch.as_tensor(s.data)), torch.as_tensor(s.targets)) for s in sets]
    names = tuple(sets[0].classes)
    return _in_memory(name, parts, held_out, num_classes, pad_to=pad_to, class_names=names)


def _in_memory(
    name: str,
    parts: Sequence[tuple[Tensor, Tensor | None]],
    held_out: float | None,
    num_classes: int | None,
    *,
    pad_to: Any = None,
    class_names: tuple[str, ...] = (),
) -> ImageData:
    """Return images in memory as `ImageData` with the name `name`.

    Args:
        parts: the training part and perhaps a test part, each a pair of images uint8 [N,C,H,W] and
            labels, int64 [N] or None.
        held_out: see `split_data`.
        num_classes, pad_to: see `npz`.
        class_names: a name for each class; () names the classes by number.
    """
    images = torch.cat([_pad(part, pad_to) for part, _ in parts])
    if num_classes == 0 or parts[0][1] is None:
        labels, class_names = None, ()
    else:
        labels = torch.cat([part.flatten() for _, part in parts if part is not None])
        class_names = check_labels(labels, num_classes, class_names, name)
    return split_data(
        name,
        ArrayDataset(images, labels),
        len(parts[0][0]),
        held_out,
        class_names,
        image_size=(images.shape[2], images.shape[3]),
        channels=images.shape[1],
    )


def _pad(images: Tensor, pad_to: int | tuple[int, int] | None) -> Tensor:
    """Return `images` [N,C,H,W] padded with zeros on all sides to the size `pad_to`, one side of a
    square or (H, W); None leaves them as they are."""
    if pad_to is None:
        return images
    from torchvision.transforms.functional import center_crop

    sides = (pad_to, pad_to) if isinstance(pad_to, int) else pad_to
    if any(side < least for side, least in zip(sides, images.shape[2:], strict=True)):
        raise ValueError(f"data.pad_to={pad_to!r} is less than the images' {images.shape[2:]}.")
    return center_crop(images, list(sides))  # pads smaller images


def _as_images(array: np.ndarray, where: str) -> Tensor:
    """Return `array`, which is uint8 [N,H,W], [N,H,W,C] or [N,C,H,W], as images [N,C,H,W]. Raises
    ValueError if it is empty or something else; the message begins with `where`."""
    shape = array.shape
    first, last = (len(shape) == 4 and shape[axis] in (1, 3, 4) for axis in (1, 3))
    if array.dtype != np.uint8 or (len(shape) != 3 and first == last):
        raise ValueError(
            f"{where} is {array.dtype} {list(shape)}; images must be uint8 [N,H,W], [N,H,W,C] or "
            "[N,C,H,W] with 1, 3 or 4 channels. Values from 0 to 1 become bytes by "
            "(x * 255).round().astype(numpy.uint8)."
        )
    if not array.size:
        raise ValueError(f"{where} is {list(shape)}: it has no images.")
    images = torch.from_numpy(array)
    return images if first else _channels_first(images)


def _channels_first(images: Tensor) -> Tensor:
    """Return images [N,H,W] or [N,H,W,C] as [N,C,H,W]."""
    return images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
