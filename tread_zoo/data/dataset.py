"""What a data set is here: map-style, an item is (image uint8 [C,H,W], label int).

Other items than images come with a `codec` that says what a model sees of them; where images are
made for embeddings, a context float [T,S] takes the place of the label (`contexts.py`).

Dimensions: N images, C channels, H height, W width, B batch, T embeddings of width S.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.codec import PIXELS, Codec


@dataclass(frozen=True)
class ImageData:
    """A training part, a held-out part, and what a model has to know of them.

    `num_classes` is 0 where the images carry no labels; each label is then 0. `held_out` is None
    where nothing was held out. `image_size` and `channels` are those that the model sees. `context`
    is None unless an item's condition is a context; there are no classes then.
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
        """Return what `create_backbone` is told of the contexts; nothing where there are none."""
        if self.context is None:
            return {}
        return dict(zip(("context_length", "context_size"), self.context, strict=True))


class ArrayDataset(Dataset):
    """Images that lie in memory: images uint8 [N,C,H,W], labels int64 [N] (None: all 0)."""

    def __init__(self, images: Tensor, labels: Tensor | None = None):
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise ValueError(
                f"images has dtype {images.dtype} and shape {tuple(images.shape)}; "
                "ArrayDataset wants uint8 [N,C,H,W]."
            )
        if labels is None:
            labels = torch.zeros(len(images), dtype=torch.int64)
        if labels.dtype != torch.int64 or tuple(labels.shape) != (len(images),):
            raise ValueError(
                f"labels has dtype {labels.dtype} and shape {tuple(labels.shape)}; "
                f"ArrayDataset wants int64 [{len(images)}], one label an image."
            )
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images [B,C,H,W], labels [B]) of `indices` int64 [B] in one indexing."""
        return self.images[indices], self.labels[indices]
