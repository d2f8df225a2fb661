"""Labels, the held-out part, evenly spaced items: the same in every run, whatever its seed."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.dataset import ArrayDataset, ImageData, TableDataset, as_bytes
from tread_zoo.data.loader import CorruptItem, read_item
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

_COMPARED = 32  # items, by which other data of the same shape are noticed


def split_data(
    name: str,
    items: ArrayDataset | TableDataset,
    num_train: int,
    held_out: float | None,
    class_names: tuple[str, ...],
    **metadata: Any,
) -> ImageData:
    """Return the data in items of which the first `num_train` are a training part and the others,
    if any, a test part.

    `held_out` is a fraction to split off the training part, which leaves the test part alone; None
    holds out the test part or, where there is none, a tenth. `metadata` are fields of `ImageData`.
    """
    if held_out is None and num_train < len(items):
        train, unseen = torch.arange(num_train), torch.arange(num_train, len(items))
    else:
        train, unseen = split_held_out(
            items.labels[:num_train], 0.1 if held_out is None else held_out
        )
    return ImageData(
        name=name,
        train=items.subset(train),
        held_out=items.subset(unseen) if len(unseen) else None,
        num_classes=len(class_names),
        class_names=class_names,
        **metadata,
    )


def split_held_out(labels: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return sorted (train, held-out) indices, int64, of images with `labels` int64 [N].

    round(fraction * N) images are held out, each class in proportion, by systematic sampling:
    image i of the n in a class (in a fixed random order) gets the key (i + u) / n, u uniform per
    class, and the smallest keys are held out. Every class keeps at least one training image.
    """
    keys = torch.full((len(labels),), float("inf"), dtype=torch.float64)
    for label in sorted(set(labels.tolist())):
        generator = make_generator("held-out", label)
        members = (labels == label).nonzero().squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        places = torch.arange(len(members), dtype=torch.float64)
        offset = torch.rand((), dtype=torch.float64, generator=generator)
        # The last of each class keeps the key inf: it is never a candidate.
        keys[members[:-1]] = ((places + offset) / len(members))[:-1]
    num_held_out = min(round(fraction * len(labels)), int(keys.isfinite().sum()))
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    is_held_out[keys.argsort(stable=True)[:num_held_out]] = True
    return (~is_held_out).nonzero().squeeze(1), is_held_out.nonzero().squeeze(1)


def check_labels(
    labels: Tensor, num_classes: int | None, names: Sequence[str], where: str
) -> tuple[str, ...]:
    """Return the names of the classes of labels int64 [N]: those given, if they are as many as the
    classes, else numbers. Without `num_classes` and names there are the largest + 1.

    Classes without an image are logged: labels may have been counted from 1.

    Raises:
        ValueError: a label is outside 0 … num_classes - 1.
    """
    low, high = int(labels.min()), int(labels.max())
    count = num_classes or len(names) or high + 1
    if low < 0 or high >= count:
        raise ValueError(
            f"{where}: the labels run from {low} to {high}; they must lie in 0 … "
            f"{max(count - 1, 0)}. data.num_classes=0 trains without labels."
        )
    empty = (torch.bincount(labels, minlength=count) == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        logger.warning(
            "labels    %s: %d of %d classes have no image (%s)", where, len(empty), count, shown
        )
    return tuple(names) if len(names) == count else tuple(map(str, range(count)))


def evenly_spaced(size: int, count: int | None) -> list[int]:
    """Return `count` indices, evenly spaced over 0 … size - 1; None or more than there are: all."""
    count = size if count is None else min(count, size)
    return [index * size // count for index in range(count)]


def ordered_as_samples(part: Any, count: int, num_classes: int) -> list[int]:
    """Return indices of `count` items of which item i has the label i mod num_classes, as sample i
    has; evenly spaced ones where there are no labels. Those of a small class come again."""
    labels = getattr(part, "labels", None)
    if not num_classes or labels is None:
        return evenly_spaced(len(part), count)
    all_items = torch.arange(len(part))
    by_class = [all_items[labels == label].tolist() for label in range(min(num_classes, count))]
    return [
        (members := by_class[i % num_classes] or all_items.tolist())[
            i // num_classes % len(members)
        ]
        for i in range(count)
    ]


def digest_items(dataset: Dataset[Any]) -> str:
    """Return four hex digits for each of up to 32 evenly spaced items, of the image as stored and
    its label; `----` for one that cannot be read."""
    digests, stored = [], getattr(dataset, "stored", None)
    for index in evenly_spaced(len(dataset), _COMPARED):  # type: ignore[arg-type]
        item = read_item(dataset, index)
        if isinstance(item, CorruptItem):
            digests.append("----")
            continue
        image = stored(index) if stored else item[0]
        digest = hashlib.sha256()
        for value in (image, *item[1:]):
            digest.update(as_bytes(value) if isinstance(value, Tensor) else repr(value).encode())
        digests.append(digest.hexdigest()[:4])
    return " ".join(digests)
