"""A data set for training: map-style, an item is (image uint8 [C,H,W], label int).

Other items than images come with a `codec` that says what a model sees of them; where images are
made for embeddings, a context float [T,S] takes the place of the label.

Dimensions: N images, C channels, H height, W width, B batch, T embeddings of width S.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.codec import PIXELS, Codec


@dataclass(frozen=True)
class ImageData:
    """What a data source returns: a training part, a held-out part, and what a model has to know.

    Args:
        name: for logs and records.
        train: items (image as stored, label or context).
        held_out: the same; None where nothing was held out.
        image_size, channels: of what the model sees.
        num_classes: 0 where there are no labels; each label is then 0.
        class_names: one for each class.
        codec: between stored items, what the model sees, and pixels.
        context: T and S where an item's condition is a context; there are no classes then.
    """

    name: str
    train: Dataset
    held_out: Dataset | None
    image_size: tuple[int, int]  # H, W
    channels: int
    num_classes: int
    class_names: tuple[str, ...]
    codec: Codec = PIXELS
    context: tuple[int, int] | None = None  # T, S

    @property
    def context_keywords(self) -> dict[str, int]:
        """Return the keywords of `create_backbone` for the contexts; none where there are none."""
        if self.context is None:
            return {}
        return dict(zip(("context_length", "context_size"), self.context, strict=True))


class ArrayDataset(Dataset):
    """Images in memory: images uint8 [N,C,H,W], labels int64 [N] (None: all 0)."""

    def __init__(self, images: Tensor, labels: Tensor | None = None):
        if labels is None:
            labels = torch.zeros(len(images), dtype=torch.int64)
        if len(labels) != len(images):
            raise ValueError(f"{len(images)} images and {len(labels)} labels: one each is needed.")
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images [B,C,H,W], labels [B]) of `indices` int64 [B] in one indexing."""
        return self.images[indices], self.labels[indices]
