"""What a data source returns, and the way between what it stores, what a model sees, and pixels.

    item           image uint8 [C,H,W] or latent as stored, label int or context float [T,S], and
                   if requested features float16 [K,S,h,w]
    stored batch   --to_model-->  x float32 [B,C,H,W]  --to_pixels-->  images uint8 [B,C,H,W]

Images are stored as bytes and seen in [-1, 1]; latents (`tread_zoo.data.latents`) have a codec of
their own. What is random is drawn from the caller's generator, never in a loader.

Dimensions: N images, B batch, C channels, H height, W width, T embeddings of width S.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.seeding import ImageGenerator

if TYPE_CHECKING:
    import datasets


def to_model_range(images: Tensor) -> Tensor:
    """Return uint8 `images` as float32 in [-1, 1]: x / 127.5 - 1."""
    if images.dtype != torch.uint8:
        raise ValueError(
            f"images has dtype {images.dtype}; to_model_range takes uint8 0 … 255 "
            "(anything else may have been scaled already)."
        )
    return images.to(torch.float32) / 127.5 - 1.0


def to_uint8(x: Tensor) -> Tensor:
    """Return `x` of [-1, 1] as uint8, clamped and rounded: the exact inverse of `to_model_range`.
    Raises ValueError for NaN, which has no nearest byte."""
    if torch.isnan(x).any():
        raise ValueError(
            f"x of shape {tuple(x.shape)} has NaN; no image can be made of it. "
            "Look at the loss of the run, or at the sampler's settings, that it came from."
        )
    return ((x.to(torch.float32).clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


def as_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU, in C order."""
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Codec:
    """How stored items become what a model sees, and what it makes becomes pixels: for images."""

    decoder: str = "none"  # where the autoencoder is, a folder or a hub's name

    @property
    def metadata(self) -> dict[str, Any]:
        """What a checkpoint remembers, as plain values; empty for pixels."""
        return {}

    @property
    def has_pixels(self) -> bool:
        """Whether `to_pixels` gives images: not for latents without their autoencoder."""
        return True

    @property
    def decoded_by(self) -> dict[str, Any] | None:
        """Class and sha256 of the network that `to_pixels` decodes with; None without one."""
        return None

    def check(self, *, flip: bool = False) -> None:
        """Raise ValueError, with the remedy, if items cannot be mirrored and `flip` is set."""

    def prepare(self, device: torch.device) -> None:
        """Load onto `device` what `to_pixels` needs. Raises ValueError if it is another one."""

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that `to_model` gives a batch of shape `stored`."""
        return tuple(stored)

    def draw(self, stored: Sequence[int], generator: ImageGenerator) -> Tensor | None:
        """Return what is random in a batch of shape `stored`, [B,C,H,W] on the generator's device,
        or None."""
        return None

    def to_model(
        self,
        stored: Tensor,
        *,
        device: torch.device,
        noise: Tensor | None = None,
        flip: Tensor | None = None,
    ) -> Tensor:
        """Return a batch as the loader gave it as the model sees it: float32 [B,C,H,W] on `device`.

        `noise` is what `draw` gave for these items (None: the mean), `flip` bool [B] on `device`
        says which of them are mirrored.
        """
        stored = stored.to(device, non_blocking=True)
        if flip is not None:
            stored = torch.where(flip.view(-1, 1, 1, 1), stored.flip(-1), stored)
        return to_model_range(stored)

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return x float [B,C,H,W] of the model's range as images uint8 on the CPU."""
        return to_uint8(x).cpu()


PIXELS = Codec()


@dataclass(frozen=True)
class ImageData:
    """What a data source returns: a training and a held-out part, and what a model has to know."""

    name: str  # for logs and records
    train: Dataset[Any]  # items (image as stored, label or context)
    held_out: Dataset[Any] | None  # the same; None where nothing was held out
    image_size: tuple[int, int]  # H, W of what the model sees
    channels: int
    num_classes: int  # 0 where there are no labels; each label is then 0
    class_names: tuple[str, ...]
    codec: Codec = PIXELS  # between stored items, what the model sees, and pixels
    context: tuple[int, int] | None = None  # T, S where an item's condition is a context
    # K, S, h, w of an encoder's features, which `train.with_features()` adds to each item: as it
    # is, and mirrored if K is 2.
    features: tuple[int, int, int, int] | None = None

    @property
    def context_keywords(self) -> dict[str, int]:
        """The keywords of `create_backbone` for the contexts; none where there are none."""
        if self.context is None:
            return {}
        return {"context_length": self.context[0], "context_size": self.context[1]}


class ArrayDataset(Dataset[Any]):
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

    def subset(self, rows: Tensor) -> "ArrayDataset":
        """Return the items `rows` int64 [K]."""
        return ArrayDataset(self.images[rows], self.labels[rows])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images [B,C,H,W], labels [B]) of `indices` int64 [B] in one indexing."""
        return self.images[indices], self.labels[indices]


@dataclass(eq=False)
class TableDataset(Dataset[Any]):
    """Some rows of a table of the `datasets` library, with labels int64 [N], all 0 without."""

    table: "datasets.Dataset"
    labels: Tensor

    def __post_init__(self) -> None:
        self.rows = torch.arange(len(self.table))

    def subset(self, rows: Tensor) -> Self:
        """Return the items `rows` int64 [K], on the same table."""
        part = copy.copy(self)
        part.rows, part.labels = self.rows[rows], self.labels[rows]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def item_name(self, index: int) -> str:
        """Return what logs call item `index`."""
        return f"row {int(self.rows[index])}"
