"""Data sets, and the codec between stored items, the model's inputs, and pixels.

    item           image uint8 [C,H,W], or latent as stored; label int, or context float [T,S];
                   features float16 [K,S,h,w], if the data set was asked for them
    stored batch   --to_model-->  x float32 [B,C,H,W]  --to_pixels-->  images uint8 [B,C,H,W]

Images are stored as bytes, and the model sees them in [-1, 1]. Latents have another codec, see
`tread_zoo.data.latents`. Noise is drawn from the caller's generator, never in a loader.

Dimensions: N images, B batch, C channels, H height, W width. A context has T embeddings of width S.
Features of an encoder have S channels on a grid h x w, in K copies: for the image and perhaps its
mirror image.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.seeding import ImageGenerator


def to_model_range(images: Tensor) -> Tensor:
    """Return uint8 `images` as float32 in [-1, 1]: x / 127.5 - 1."""
    if images.dtype != torch.uint8:
        raise ValueError(
            f"images has dtype {images.dtype}; to_model_range takes uint8 0 … 255 "
            "(other types may be scaled already)."
        )
    return images.to(torch.float32) / 127.5 - 1.0


def to_uint8(x: Tensor) -> Tensor:
    """Return `x`, in [-1, 1], as uint8, clamped and rounded: the exact inverse of `to_model_range`.
    Raises ValueError for NaN."""
    if torch.isnan(x).any():
        raise ValueError(
            f"x of shape {tuple(x.shape)} has NaN and cannot become an image. Check the loss of "
            "the run and the sampler's settings."
        )
    return ((x.to(torch.float32).clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)


def as_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU, in C order."""
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class Codec:
    """Converts stored items to model inputs, and model outputs to pixels. This class does so for
    images, its subclass `LatentCodec` for latents."""

    decoder: str = "none"  # the autoencoder, a folder or a name on the hub

    @property
    def metadata(self) -> dict[str, Any]:
        """What a checkpoint stores about the codec, as plain values; empty for pixels."""
        return {}

    @property
    def has_pixels(self) -> bool:
        """Whether `to_pixels` gives images; false for latents without an autoencoder."""
        return True

    @property
    def decoded_by(self) -> dict[str, Any] | None:
        """Class and sha256 of the network that `to_pixels` decodes with; None without one."""
        return None

    def check(self, *, flip: bool = False) -> None:
        """Raise ValueError if training mirrors images (`flip`) but the items do not allow it."""

    def prepare(self, device: torch.device) -> None:
        """Load the autoencoder, if there is one, onto `device`. Raises ValueError if it is not the
        one that encoded the data."""

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that `to_model` gives a batch of shape `stored`."""
        return tuple(stored)

    def draw(self, stored: Sequence[int], generator: ImageGenerator) -> Tensor | None:
        """Return the noise [B,C,H,W] that `to_model` takes for a batch of shape `stored`, on the
        generator's device, or None if it takes none."""
        return None

    def to_model(
        self,
        stored: Tensor,
        *,
        device: torch.device,
        noise: Tensor | None = None,
        flip: Tensor | None = None,
    ) -> Tensor:
        """Return the model's input, float32 [B,C,H,W] on `device`, for a batch from the loader.

        `noise` comes from `draw`; without it, each latent is the mean of its distribution. `flip`,
        bool [B] on `device`, marks the images to mirror.
        """
        stored = stored.to(device, non_blocking=True)
        if flip is not None:
            stored = torch.where(flip.view(-1, 1, 1, 1), stored.flip(-1), stored)
        return to_model_range(stored)

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return x, float [B,C,H,W] in the model's range, as images uint8 on the CPU. Latents are
        decoded on `device`."""
        return to_uint8(x).cpu()


PIXELS = Codec()


@dataclass(frozen=True)
class ImageData:
    """A training and a held-out data set, the size and classes of their images, and the codec.

    Args:
        name: name of the data, for logs and records.
        train, held_out: data sets with items (image as stored, label or context); `held_out` is
            None if nothing is held out.
        image_size, channels: (H, W) and C of the model's input.
        num_classes, class_names: number and names of the classes; 0 and () without labels, and each
            label is then 0.
        codec: converts stored items to model inputs, and model outputs to pixels.
        context: (T, S) if items have contexts: T embeddings of width S.
        text_encoder: name, class and sha256 of the encoder that made the contexts, if known.
        features: shape (K, S, h, w) of an encoder's features, which `train.with_features()` adds to
            each item: K copies of S channels. If K is 2, the second is of the mirrored image.
    """

    name: str
    train: Dataset[Any]
    held_out: Dataset[Any] | None
    image_size: tuple[int, int]
    channels: int
    num_classes: int
    class_names: tuple[str, ...]
    codec: Codec = PIXELS
    context: tuple[int, int] | None = None
    text_encoder: dict[str, str] | None = None
    features: tuple[int, int, int, int] | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The data sets by name: `train` and, if there is one, `held_out`."""
        parts = {"train": self.train, "held_out": self.held_out}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def context_keywords(self) -> dict[str, int]:
        """`context_length` and `context_size` for `create_backbone`; empty without contexts."""
        if self.context is None:
            return {}
        return {"context_length": self.context[0], "context_size": self.context[1]}


class ArrayDataset(Dataset[Any]):
    """Images in memory: images uint8 [N,C,H,W], labels int64 [N] (None: all 0)."""

    def __init__(self, images: Tensor, labels: Tensor | None = None):
        if labels is None:
            labels = torch.zeros(len(images), dtype=torch.int64)
        if len(labels) != len(images):
            raise ValueError(
                f"{len(images)} images and {len(labels)} labels: their numbers must agree."
            )
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    def subset(self, rows: Tensor) -> "ArrayDataset":
        """Return a data set of the K items at `rows`, int64 [K]."""
        return ArrayDataset(self.images[rows], self.labels[rows])

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return (images [B,C,H,W], labels [B]) of `indices` int64 [B]."""
        return self.images[indices], self.labels[indices]


@dataclass(eq=False)
class TableDataset(Dataset[Any]):
    """Rows of a table of the `datasets` library, with labels int64 [N]; unlabelled rows have label
    0."""

    table: Any  # of the `datasets` library, or anything with a length
    labels: Tensor

    def __post_init__(self) -> None:
        self.rows = torch.arange(len(self.table))

    def subset(self, rows: Tensor) -> Self:
        """Return a data set of the K items at `rows`, int64 [K], with the same table."""
        part = copy.copy(self)
        part.rows, part.labels = self.rows[rows], self.labels[rows]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def item_name(self, index: int) -> str:
        """Return the name of item `index` for logs."""
        return f"row {int(self.rows[index])}"
