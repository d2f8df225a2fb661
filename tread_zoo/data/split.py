"""Choice of the held-out part and of evenly spaced items, independent of a run's seed."""

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.dataset import ArrayDataset, ImageData, TableDataset, as_bytes
from tread_zoo.data.loader import CorruptItem, read_item
from tread_zoo.seeding import make_generator

_COMPARED = 32  # items, to tell data of the same shape apart


def split_data(
    name: str,
    items: ArrayDataset | TableDataset,
    num_train: int,
    held_out: float | None,
    class_names: tuple[str, ...],
    **metadata: Any,
) -> ImageData:
    """Return `items` as `ImageData` with a training part and a part that is held out.

    Args:
        name: name of the data, for logs and records.
        items: all items: the first `num_train` are for training, the others are a test part.
        num_train: number of items before the test part.
        held_out: fraction held out of the training items; the test part is then not used. None
            holds out the test part or, without one, a tenth of the training items.
        class_names: a name for each class; () without labels.
        metadata: the other fields of `ImageData`.
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

    round(fraction * N) images are held out, in proportion to the classes, by systematic sampling:
    image i of n in a class (in a fixed random order) gets the key (i + u) / n, u uniform per class,
    and the smallest keys are held out. Every class keeps at least one training image.
    """
    keys = torch.full((len(labels),), float("inf"), dtype=torch.float64)
    for label in sorted(set(labels.tolist())):
        generator = make_generator("held-out", label)
        members = (labels == label).nonzero().squeeze(1)
        members = members[torch.randperm(len(members), generator=generator)]
        places = torch.arange(len(members), dtype=torch.float64)
        offset = torch.rand((), dtype=torch.float64, generator=generator)
        # the last of each class keeps the key inf and is never held out
        keys[members[:-1]] = ((places + offset) / len(members))[:-1]
    num_held_out = min(round(fraction * len(labels)), int(keys.isfinite().sum()))
    is_held_out = torch.zeros(len(labels), dtype=torch.bool)
    is_held_out[keys.argsort(stable=True)[:num_held_out]] = True
    return (~is_held_out).nonzero().squeeze(1), is_held_out.nonzero().squeeze(1)


def evenly_spaced(size: int, count: int | None) -> list[int]:
    """Return `count` evenly spaced indices of 0 … size - 1; all for None or a larger count."""
    count = size if count is None else min(count, size)
    return [index * size // count for index in range(count)]


def ordered_as_samples(part: Any, count: int, num_classes: int) -> list[int]:
    """Return the indices of `count` items of a data set in the order of samples: the i-th index is
    of an item with label i mod num_classes, the label of sample i. Items of small classes are
    repeated, and any items stand in for a class that has none. Without labels, the items are evenly
    spaced."""
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
    """Return a digest of a data set, to tell it from another one of the same shape. It consists of
    four hex digits for each of up to 32 evenly spaced items, from a hash of the stored image and
    its label; a corrupt item has `----`. If the data set has an attribute `digest` that is not
    empty, this is returned instead."""
    if own := getattr(dataset, "digest", ""):
        return str(own)
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
