"""Images from tar shards as WebDataset lays them out: a picture and, with labels, a `.cls` each.

Read by random access through an index (`tread_zoo.data.shards`), so that a step's images depend
on its number alone. C channels, H height, W width.
"""

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.contexts import MemberContexts, WithContexts, check_context_options
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.from_folder import SUFFIXES
from tread_zoo.data.pictures import check_picture_options, picture_size, read_picture
from tread_zoo.data.shards import ShardReader, find_shards, open_index
from tread_zoo.data.split import split_held_out
from tread_zoo.registry import register

_LOOKED_AT = 256  # pictures whose sizes are compared before a run
_PAYLOAD = tuple(suffix.removeprefix(".") for suffix in SUFFIXES)


@register("data", "webdataset")
def webdataset(
    path: str,
    image_size: int | None = None,
    channels: int = 3,
    held_out: float = 0.1,
    held_out_path: str | None = None,
    num_classes: int | None = None,
    context: str | None = None,
    context_length: int | None = None,
) -> ImageData:
    """Return the pictures in local tar shards.

    path: a folder of .tar files, one file, or a pattern: `train-{000..127}.tar`, `train-*.tar`.
    image_size, channels: as `image_folder` has them.
    held_out: the fraction split off, the same samples in every run.
    held_out_path: shards of their own for the held-out part, in place of the fraction.
    num_classes: the largest label + 1 unless given; 0 drops the labels.
    context: the suffix of a sample's embeddings, `context.npy`; they take the place of the labels.
    context_length: embeddings of an image, others filled up with zeros; None is the most there are.

    Raises ValueError, naming the shard, for whatever does not fit this.
    """
    check_picture_options(image_size, channels)
    check_context_options(context, context_length, num_classes)
    shards, test_shards = find_shards(path), []
    reader = ShardReader(open_index(shards, _PAYLOAD))
    test = None
    if held_out_path is not None:
        test_shards = find_shards(held_out_path)
        test = ShardReader(open_index(test_shards, _PAYLOAD))
    readers = [reader] if test is None else [reader, test]
    for one in readers:
        one.index.warn()
    contexts = None
    if context is not None:
        num_classes, suffix = 0, (context.lstrip("."),)
        parts = [part for part in (shards, test_shards) if part]
        contexts = MemberContexts(
            [ShardReader(open_index(part, suffix)) for part in parts], context_length
        )
    num_classes = count_classes([found.index.label for found in readers], num_classes, path)
    if image_size is None:
        sizes = [_common_size(found) for found in readers]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the pictures differ in size: {sizes[0]} (height, width) in data.path, "
                f"{sizes[1]} in data.held_out_path. Set data.image_size."
            )
        size = sizes[0]
    else:
        size = (image_size, image_size)

    def subset(of: ShardReader, indices: np.ndarray) -> Dataset:
        pictures = ShardImages(of, indices, size, image_size, channels, labelled=num_classes > 0)
        if contexts is None:
            return pictures
        return WithContexts(pictures, contexts, indices + (len(reader) if of is test else 0))

    if test is None:
        labels = torch.from_numpy(reader.index.label if num_classes else 0 * reader.index.label)
        kept, split_off = (part.numpy() for part in split_held_out(labels, held_out))
        train, unseen = subset(reader, kept), subset(reader, split_off) if len(split_off) else None
    else:
        train, unseen = subset(reader, np.arange(len(reader))), subset(test, np.arange(len(test)))
    return ImageData(
        name=f"{shards[0].parent.name}/*.tar",  # never mistaken for a built-in source
        train=train,
        held_out=unseen,
        image_size=size,
        channels=channels,
        num_classes=num_classes,
        class_names=tuple(str(label) for label in range(num_classes)),
        context=None if contexts is None else contexts.shape,
    )


class ShardImages(Dataset):
    """Pictures in shards.

    indices: those of the reader's samples that belong to it.
    image_size: the (H, W) of every picture, here as it lies or after resizing to `side`.
    """

    def __init__(
        self,
        reader: ShardReader,
        indices: np.ndarray,
        image_size: tuple[int, int],
        side: int | None,
        channels: int,
        *,
        labelled: bool,
    ):
        self.reader, self.indices = reader, indices
        self.image_size, self.side, self.channels = image_size, side, channels
        self.labels = reader.index.label[indices] if labelled else np.zeros(len(indices), np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image uint8 [C,H,W], label). Raises ValueError naming an unreadable sample."""
        item = int(self.indices[index])
        where = self.reader.where(item)
        stream = io.BytesIO(self.reader.read(item))
        image = read_picture(stream, where, self.side, self.channels)
        size = (image.shape[1], image.shape[2])
        if size != self.image_size:
            raise _differs(where, size, self.image_size)
        return image, int(self.labels[index])

    def item_name(self, index: int) -> str:
        """Return the shard of item `index` and its place there."""
        return self.reader.where(int(self.indices[index]))

    def lost_items(self) -> list[int]:
        """Return the items that damaged shards lack."""
        return np.flatnonzero(self.reader.index.size[self.indices] < 0).tolist()


def count_classes(labels: list[np.ndarray], num_classes: int | None, path: str | Path) -> int:
    """Return the number of classes of parts whose labels, int64 [n], are -1 where there is none.

    Raises:
        ValueError: some samples have a label and some none, or one lies outside.
    """
    every = np.concatenate(labels)
    if num_classes is not None and num_classes < 0:
        raise ValueError(f"data.num_classes={num_classes} must be 0 (no labels) or more.")
    if num_classes == 0 or not len(every) or (num_classes is None and every.max() < 0):
        return 0
    bare = int((every < 0).sum())
    if bare:
        raise ValueError(
            f"data.path={str(path)!r}: {bare} of {len(every)} samples have no label (.cls). Add "
            "them, or set data.num_classes=0 to train without labels."
        )
    largest = int(every.max())
    if num_classes is not None and largest >= num_classes:
        raise ValueError(
            f"data.num_classes={num_classes}, but data.path={str(path)!r} has the label {largest}; "
            f"use at least {largest + 1}."
        )
    return largest + 1 if num_classes is None else num_classes


def _common_size(reader: ShardReader) -> tuple[int, int]:
    """Return the (H, W) that pictures spread over the shards share; the others are checked when
    they are read, for to open all of them would read every byte. So are those that cannot be read.
    """
    spread = sorted({index * len(reader) // _LOOKED_AT for index in range(_LOOKED_AT)})
    first, unread = None, None
    for item in spread:
        where = reader.where(item)
        try:
            size = picture_size(io.BytesIO(reader.read(item)), where)
        except ValueError as error:
            unread = unread or error
            continue
        first = first or size
        if size != first:
            raise _differs(where, size, first)
    if first is None:
        raise ValueError(f"none of {len(spread)} pictures can be read: {unread}") from unread
    return first


def _differs(where: str, size: tuple[int, int], first: tuple[int, int]) -> ValueError:
    return ValueError(
        f"the pictures differ in size: the first is {first[0]}x{first[1]}, that in {where} is "
        f"{size[0]}x{size[1]} (height x width). Set data.image_size to resize and crop them all to "
        "one square."
    )
