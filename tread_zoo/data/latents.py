"""Tables of latents or of images, what a model sees of latents, and how they become images.

    x = (z - shift) scale,    z = mean + std noise   (moments)  or as stored

`normalization=standardize` takes shift and scale from the data's own mean and standard deviation,
channel by channel, so that x has mean 0 and deviation 1 with every autoencoder. `scale` takes the
autoencoder's own numbers, which published networks were trained with.

The table (`encode.py` writes it) is a folder:

    table.json              what is in it, and what made it
    train-00000.arrow …     columns latent or image (bytes), label, and perhaps context, features
    held_out-00000.arrow …  (float16 bytes)

Dimensions: B batch, K copies (2: as it is, mirrored), C channels of a latent (2 C stored where
there are moments), h height, w width, S channels of features.
"""

import copy
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import NonNegativeInt
from torch import Tensor

from tread_zoo.data.dataset import PIXELS, Codec, ImageData, TableDataset, to_uint8
from tread_zoo.data.split import check_labels, split_data
from tread_zoo.data.vae import Vae, load_vae
from tread_zoo.fields import Fraction
from tread_zoo.registry import register
from tread_zoo.seeding import ImageGenerator

SPLITS = ("train", "held_out")
DECODE_BATCH = 8  # images: decoding needs far more memory than the latents
_LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers has it


def split_moments(stored: Tensor, content: str) -> tuple[Tensor, Tensor | None]:
    """Return mean and standard deviation (None for samples), float32 [..., C, h, w], of latents as
    stored; `content` is samples, pixels, mean_logvar or mean_std."""
    stored = stored.float()
    if content in ("samples", "pixels"):
        return stored, None
    mean, std = stored.chunk(2, dim=-3)
    return mean, (0.5 * std.clamp(*_LOGVAR_RANGE)).exp() if content == "mean_logvar" else std


@dataclass(frozen=True)
class LatentCodec(Codec):
    """Latents [B,K,C,h,w] or, with moments, [B,K,2C,h,w]. See `Codec` for the methods."""

    content: str  # samples, mean_logvar or mean_std
    flips: bool  # K is 2, and the second copy is that of the mirrored image
    normalization: str  # its name, for records
    shift: tuple[float, ...]  # C numbers
    scale: tuple[float, ...]
    vae: dict[str, Any] | None  # class and sha256 of the one that they were made with, if known
    decoder: str  # where it is, a folder or a hub's name; none: nowhere, there are no pictures

    @property
    def metadata(self) -> dict[str, Any]:
        """All that a model depends on; not where the autoencoder is."""
        return {
            "kind": "latents",
            "content": self.content,
            "normalization": self.normalization,
            "shift": list(self.shift),
            "scale": list(self.scale),
            "vae": self.vae,
        }

    @property
    def has_pixels(self) -> bool:
        return self.decoder != "none"

    @property
    def decoded_by(self) -> dict[str, Any] | None:
        if not self.has_pixels:
            return None
        return self.vae or {"class": self.autoencoder.kind, "sha256": self.autoencoder.sha256}

    @functools.cached_property
    def autoencoder(self) -> Vae:
        """The one that decodes. Raises ValueError if it is not the one that encoded."""
        vae = load_vae(self.decoder)
        if self.vae is not None and vae.sha256 != self.vae["sha256"]:
            raise ValueError(
                f"vae={self.decoder!r} is another autoencoder ({vae.kind}, sha256 "
                f"{vae.sha256[:12]}…) than the latents were made with ({self.vae['sha256'][:12]}…)."
            )
        return vae

    def check(self, *, flip: bool = False) -> None:
        if flip and not self.flips:
            raise ValueError(
                "training.horizontal_flip=true, but these latents have no mirrored copies: encode "
                "with flips=true, or set training.horizontal_flip=false."
            )

    def prepare(self, device: torch.device) -> None:
        if self.has_pixels:
            self.autoencoder.to(device)

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return (B, C, h, w) for (B, K, C or 2C, h, w)."""
        batch, _, channels, height, width = stored
        return batch, channels // (1 if self.content == "samples" else 2), height, width

    def draw(self, stored: Sequence[int], generator: ImageGenerator) -> Tensor | None:
        """Return the noise of moments; samples have none."""
        if self.content == "samples":
            return None
        return generator.randn(*self.model_shape(stored)[1:])

    def to_model(
        self,
        stored: Tensor,
        *,
        device: torch.device,
        noise: Tensor | None = None,
        flip: Tensor | None = None,
    ) -> Tensor:
        """Return normalised latents, those of moments at their `noise`."""
        stored = stored.to(device, non_blocking=True)
        chosen = stored[:, 0]
        if flip is not None:
            chosen = torch.where(flip.view(-1, 1, 1, 1), stored[:, 1], chosen)
        z, std = split_moments(chosen, self.content)
        if std is not None and noise is not None:
            z = z + std * noise.to(device)
        return (z - _column(self.shift, z.device)) * _column(self.scale, z.device)

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return decoded images."""
        vae = self.autoencoder.to(device)
        parts = torch.split(self.to_latents(x), DECODE_BATCH)
        return torch.cat([to_uint8(vae.decode(z.to(device))).cpu() for z in parts])

    def to_latents(self, x: Tensor) -> Tensor:
        """Return the autoencoder's own latents, float32, of x: z = x / scale + shift."""
        return x.float() / _column(self.scale, x.device) + _column(self.shift, x.device)


@functools.lru_cache(maxsize=16)
def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return a number a channel, float32 [C,1,1], copied to `device` once."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def imported_codec(vae: str, num_channels: int) -> LatentCodec:
    """Return the codec of a network from elsewhere on latents of C channels, scaled as `vae` says;
    for `vae=none` they are left as they are. Raises ValueError for a vae of other channels."""
    shift, scale, metadata = 0.0, 1.0, None
    if vae != "none":
        decoder = load_vae(vae)
        if decoder.latent_channels != num_channels:
            raise ValueError(
                f"vae={vae!r} has latents of {decoder.latent_channels} channels, the network has "
                f"{num_channels}: name the autoencoder that it was trained with."
            )
        shift, scale = decoder.metadata["shift_factor"], decoder.metadata["scaling_factor"]
        metadata = {"class": decoder.kind, "sha256": decoder.sha256}
    columns = (shift,) * num_channels, (scale,) * num_channels
    return LatentCodec("samples", False, "scale", *columns, metadata, vae)


def restore_codec(metadata: dict[str, Any], vae: str) -> LatentCodec:
    """Return the codec that a checkpoint describes; its autoencoder is at `vae` (none: nowhere)."""
    values = {name: value for name, value in metadata.items() if name != "kind"}
    values |= {"shift": tuple(metadata["shift"]), "scale": tuple(metadata["scale"])}
    return LatentCodec(**values, flips=False, decoder=vae)


@register("data", "latents")
def latents(
    path: str,
    normalization: Literal["standardize", "scale"] = "standardize",
    vae: str | None = None,
    held_out: Fraction | None = None,
    num_classes: NonNegativeInt | None = None,
    context: bool = True,
) -> ImageData:
    """Return the latents that tread-zoo encode or tread-zoo convert-latents wrote.

    Args:
        path: the folder.
        normalization: standardize (mean 0, standard deviation 1 by channel) or scale (the
            autoencoder's).
        vae: a diffusers autoencoder for pictures and scores, a folder or a hub's name; None is the
            one that made them; none goes without pictures.
        held_out: a fraction split off the training part; None is the held-out part of the table or,
            where it has none, 0.1.
        num_classes: the table's unless given; 0 drops the labels.
        context: contexts, where there are any, are the condition; false drops them.
    """
    root = Path(path).expanduser()
    metadata = _read_metadata(root, pixels=False)
    encoder = metadata["vae"]
    if encoder is None and vae not in (None, "none"):
        encoder = load_vae(vae).metadata
    shift, scale = _normalize(normalization, metadata, encoder)
    codec = LatentCodec(
        content=metadata["content"],
        flips=metadata["shape"][0] == 2,
        normalization=normalization,
        shift=shift,
        scale=scale,
        vae={key: encoder[key] for key in ("class", "sha256")} if encoder else None,
        decoder=vae or (encoder["name"] if encoder else "none"),
    )
    # the name is never mistaken for a built-in source's
    name, shape = f"{root.name} (latents)", codec.model_shape((1, *metadata["shape"]))[1:]
    return _table_data(name, root, metadata, shape, held_out, num_classes, context, codec)


@register("data", "table")
def table(
    path: str,
    held_out: Fraction | None = None,
    num_classes: NonNegativeInt | None = None,
    context: bool = True,
) -> ImageData:
    """Return the images that tread-zoo encode wrote with vae=none, perhaps with features.

    Args:
        path: the folder.
        held_out, num_classes, context: as of `latents`.
    """
    root = Path(path).expanduser()
    metadata = _read_metadata(root, pixels=True)
    metadata["shape"] = metadata["shape"][1:]  # one copy
    name = f"{root.name} (table)"  # never mistaken for a built-in source
    return _table_data(
        name, root, metadata, metadata["shape"], held_out, num_classes, context, PIXELS
    )


def _table_data(
    name: str,
    root: Path,
    metadata: dict[str, Any],
    shape: Sequence[int],
    held_out: float | None,
    num_classes: int | None,
    context: bool,
    codec: Codec,
) -> ImageData:
    """Return the data of a table, of which a model sees [C,H,W] of `shape`."""
    import datasets

    train, test = (
        [datasets.Dataset.from_file(str(root / name)) for name in metadata["parts"][part]]
        for part in SPLITS
    )
    table = datasets.concatenate_datasets([*train, *test])
    contexts, names = None, tuple[str, ...]()
    labels = torch.zeros(len(table), dtype=torch.int64)
    if context and metadata["context"]:
        contexts = (metadata["context"][0], metadata["context"][1])
    elif count := metadata["num_classes"] if num_classes is None else num_classes:
        labels = torch.tensor(table.data.column("label").to_numpy())
        names = check_labels(labels, count, metadata["class_names"], str(root))
    features = metadata["features"] and tuple(metadata["features_shape"])
    column = "image" if metadata["content"] == "pixels" else "latent"
    own_shape, dtype = metadata["shape"], metadata["dtype"]
    return split_data(
        name,
        EncodedTable(table, labels, column, own_shape, dtype, contexts, features),
        sum(map(len, train)),
        held_out,
        names,
        image_size=(shape[1], shape[2]),
        channels=shape[0],
        codec=codec,
        context=contexts,
        features=features,
    )


def _normalize(
    normalization: str, metadata: dict[str, Any], vae: dict[str, Any] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return shift and scale, C numbers each, of a table's own mean and std or of the vae's."""
    mean = metadata["mean"]
    if normalization == "standardize":
        return tuple(mean), tuple(1.0 / value for value in metadata["std"])
    if vae is None:
        raise ValueError(
            "data.normalization=scale takes the factor of the autoencoder, and none is named: "
            "set data.vae=…, or data.normalization=standardize."
        )
    return (vae["shift_factor"],) * len(mean), (vae["scaling_factor"],) * len(mean)


def _read_metadata(root: Path, *, pixels: bool) -> dict[str, Any]:
    """Return the table.json of a folder. Raises ValueError if the table is not finished, or has
    latents for `pixels`, or the reverse."""
    metadata: dict[str, Any] = json.loads((root / "table.json").read_text())
    if "mean" not in metadata:
        raise ValueError(f"data.path={str(root)!r} is not finished: encode with the same command.")
    if (metadata["content"] == "pixels") is not pixels:
        other = "latents" if pixels else "table"
        raise ValueError(f"data.path={str(root)!r} has {metadata['content']}: use data={other}.")
    return metadata


@dataclass(eq=False)
class EncodedTable(TableDataset):
    """Some rows of a table of latents [K,C',h,w] or images [C,H,W] as stored, with their labels or
    contexts, all bytes, read straight from the memory-mapped Arrow chunks."""

    column: str  # latent or image
    shape: Sequence[int]  # of one
    dtype: str
    context: tuple[int, int] | None  # T and S, where contexts are the condition
    features: tuple[int, ...] | None  # [K,S,h,w], where there are any
    reads_features: bool = False

    def with_features(self) -> Self:
        """Return the same items with their features behind the label or context."""
        part = copy.copy(self)
        part.reads_features = True
        return part

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return (latent or image, label or context), and features if requested."""
        row, condition = int(self.rows[index]), int(self.labels[index])
        item: list[Any] = [self._read(self.column, row, self.shape, self.dtype), condition]
        if self.context is not None:
            item[1] = self._read("context", row, self.context, "float16")
        if self.reads_features and self.features is not None:
            item.append(self._read("features", row, self.features, "float16"))
        return tuple(item)

    def _read(self, column: str, row: int, shape: Sequence[int], dtype: str) -> Tensor:
        content = bytearray(self.table.data.column(column)[row].as_buffer())
        return torch.frombuffer(content, dtype=getattr(torch, dtype)).view(*shape)
