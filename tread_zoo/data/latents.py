"""Tables of latents or images, and the codec of latents.

    x = (z - shift) scale        z as stored or, if moments are stored, z = mean + std noise

`normalization=standardize` takes shift and scale from the data's mean and standard deviation by
channel, so that x has mean 0 and standard deviation 1 with every autoencoder. `normalization=scale`
takes the autoencoder's own numbers, with which published networks were trained.

The table (`encode.py` writes it) is a folder:

    table.json              shape, statistics, settings and autoencoder
    train-00000.arrow …     rows of the training part
    held_out-00000.arrow …  rows of the held-out part
    labels.npy              labels of all rows

A row has the columns latent or image, label, and perhaps context and features. All but the label
are stored as bytes, contexts and features in float16.

Dimensions: B batch, K copies (2: the second is mirrored), C channels of a latent (2C if moments are
stored: the mean, then the log-variance or the standard deviation), h height, w width, S channels of
features, H and W height and width of an image.
"""

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor

from tread_zoo.data.arrow import ArrowTable
from tread_zoo.data.dataset import PIXELS, Codec, ImageData, TableDataset, to_uint8
from tread_zoo.data.labels import check_labels
from tread_zoo.data.split import split_data
from tread_zoo.data.vae import Vae, load_vae
from tread_zoo.fields import Fraction
from tread_zoo.registry import register
from tread_zoo.seeding import ImageGenerator

SPLITS = ("train", "held_out")
DECODE_BATCH = 8  # images: decoding needs far more memory than the latents
_LOGVAR_RANGE = (-30.0, 20.0)  # as in diffusers


def split_moments(stored: Tensor, content: str) -> tuple[Tensor, Tensor | None]:
    """Return the mean and the standard deviation, float32 [..., C, h, w], of `stored`.

    If `content` is "mean_logvar" or "mean_std", both are in `stored`, [..., 2C, h, w]. If it is
    "samples" or "pixels", `stored` [..., C, h, w] is the mean, and the deviation is None."""
    stored = stored.float()
    if content in ("samples", "pixels"):
        return stored, None
    mean, std = stored.chunk(2, dim=-3)
    return mean, (0.5 * std.clamp(*_LOGVAR_RANGE)).exp() if content == "mean_logvar" else std


@dataclass(frozen=True)
class LatentCodec(Codec):
    """The codec for stored latents [B,K,C,h,w], or for their moments [B,K,2C,h,w]. See `Codec`.

    Args:
        content: what is stored: "samples", or one of two kinds of moments, "mean_logvar" (the mean,
            then the log-variance) and "mean_std" (the mean, then the standard deviation).
        flips: whether K is 2, and the second copy is of the mirrored image; else K is 1.
        normalization: "standardize" or "scale", for records; see `latents`.
        shift, scale: C numbers each; see `to_latents`.
        vae: class and sha256 of the autoencoder that encoded the data, if known.
        decoder: the autoencoder that decodes, a folder or a name on the hub; "none": no decoding.
    """

    content: str
    flips: bool
    normalization: str
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    vae: dict[str, Any] | None
    decoder: str

    @property
    def metadata(self) -> dict[str, Any]:
        """What a checkpoint stores: all that a model depends on, so not the autoencoder's path."""
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
        """The autoencoder that decodes. Raises ValueError if a different one encoded the data."""
        vae = load_vae(self.decoder)
        if self.vae is not None and vae.sha256 != self.vae["sha256"]:
            raise ValueError(
                f"vae={self.decoder!r} is another autoencoder ({vae.kind}, sha256 "
                f"{vae.sha256[:12]}…) than the encoding one ({self.vae['sha256'][:12]}…)."
            )
        return vae

    def check(self, *, flip: bool = False) -> None:
        if flip and not self.flips:
            raise ValueError(
                "training.horizontal_flip=true, but the table has no latents of mirrored images: "
                "encode with flips=true, or set training.horizontal_flip=false."
            )

    def prepare(self, device: torch.device) -> None:
        if self.has_pixels:
            self.autoencoder.to(device)

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return (B, C, h, w) for the shape `stored`, (B, K, C or 2C, h, w)."""
        batch, _, channels, height, width = stored
        return batch, channels // (1 if self.content == "samples" else 2), height, width

    def draw(self, stored: Sequence[int], generator: ImageGenerator) -> Tensor | None:
        """Return the noise [B,C,h,w] with which `to_model` samples latents from a batch of moments
        of the shape `stored`. None if the table has samples instead of moments."""
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
        """Return normalised latents, float32 [B,C,h,w]. If moments are stored, the latents before
        normalisation are samples made with `noise`; without it, they are the means."""
        stored = stored.to(device, non_blocking=True)
        chosen = stored[:, 0]
        if flip is not None:
            chosen = torch.where(flip.view(-1, 1, 1, 1), stored[:, 1], chosen)
        z, std = split_moments(chosen, self.content)
        if std is not None and noise is not None:
            z = z + std * noise.to(device)
        return (z - _column(self.shift, z.device)) * _column(self.scale, z.device)

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return the images uint8 [B,3,H,W], on the CPU, that the autoencoder decodes on `device`
        from model outputs x [B,C,h,w]."""
        vae = self.autoencoder.to(device)
        parts = torch.split(self.to_latents(x), DECODE_BATCH)
        return torch.cat([to_uint8(vae.decode(z.to(device))).cpu() for z in parts])

    def to_latents(self, x: Tensor) -> Tensor:
        """Return the autoencoder's latents for model outputs x, float32: z = x / scale + shift."""
        return x.float() / _column(self.scale, x.device) + _column(self.shift, x.device)


@functools.lru_cache(maxsize=16)
def _column(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return C numbers as float32 [C,1,1] on `device`; the copy is cached."""
    return torch.tensor(values, dtype=torch.float32, device=device).view(-1, 1, 1)


def imported_codec(vae: str, num_channels: int) -> LatentCodec:
    """Return the codec for a network that was trained elsewhere, on latents of `num_channels`
    channels. Shift and scale are those of the autoencoder `vae`; with `vae=none`, latents are not
    scaled. Raises ValueError if the autoencoder has another number of channels."""
    shift, scale, metadata = 0.0, 1.0, None
    if vae != "none":
        decoder = load_vae(vae)
        if decoder.latent_channels != num_channels:
            raise ValueError(
                f"vae={vae!r} has latents of {decoder.latent_channels} channels, the network takes "
                f"{num_channels}: name the autoencoder of its training."
            )
        shift, scale = decoder.metadata["shift_factor"], decoder.metadata["scaling_factor"]
        metadata = {"class": decoder.kind, "sha256": decoder.sha256}
    columns = (shift,) * num_channels, (scale,) * num_channels
    return LatentCodec("samples", False, "scale", *columns, metadata, vae)


def restore_codec(metadata: dict[str, Any], vae: str) -> LatentCodec:
    """Return the codec that a checkpoint's metadata describe. `vae` is the autoencoder that
    decodes, a folder or a name on the hub; with `none`, latents cannot be decoded."""
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
    cache: str | None = None,
    cached_parts: Annotated[int, Field(ge=2)] = 16,
) -> ImageData:
    """Return the latents of a table from tread-zoo encode or `write_table`.

    Args:
        path: the table's folder, or its address in a bucket, as in s3://bucket/folder, which needs
            pip install s3fs.
        normalization: `standardize` (each channel gets mean 0 and standard deviation 1) or `scale`
            (shift and scale are the autoencoder's).
        vae: the diffusers autoencoder that decodes latents for pictures and scores, a folder or a
            name on the hub. null is the one that encoded the table; `none` makes no pictures.
        held_out: fraction held out of the training part. null takes the table's held-out part or,
            without one, 0.1.
        num_classes: number of classes; null takes the table's; 0 drops the labels.
        context: whether to condition on the table's contexts, if it has any.
        cache: folder for the downloaded files of a table in a bucket; null: $TREAD_ZOO_CACHE
            or ~/.cache/tread_zoo.
        cached_parts: number of downloaded files that are kept; an epoch mixes the images of half
            as many files at a time.
    """
    stored = _open_table(path, cache, cached_parts, pixels=False)
    metadata = stored.metadata
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
    shape = codec.model_shape((1, *metadata["shape"]))[1:]
    return _table_data(stored, shape, held_out, num_classes, context, codec)


@register("data", "table")
def table(
    path: str,
    held_out: Fraction | None = None,
    num_classes: NonNegativeInt | None = None,
    context: bool = True,
    cache: str | None = None,
    cached_parts: Annotated[int, Field(ge=2)] = 16,
) -> ImageData:
    """Return the images of a table from tread-zoo encode with vae=none, perhaps with features.

    Args:
        path: the table's folder, or its address in a bucket.
        held_out, num_classes, context, cache, cached_parts: see `latents`.
    """
    stored = _open_table(path, cache, cached_parts, pixels=True)
    stored.metadata["shape"] = stored.metadata["shape"][1:]  # without K, which is 1
    return _table_data(stored, stored.metadata["shape"], held_out, num_classes, context, PIXELS)


def _table_data(
    table: ArrowTable,
    shape: Sequence[int],
    held_out: float | None,
    num_classes: int | None,
    context: bool,
    codec: Codec,
) -> ImageData:
    """Return the rows of `table` as `ImageData`. `shape` is [C,H,W] of a model input, which `codec`
    makes of a stored item. For the other arguments see `latents`."""
    metadata, contexts, names = table.metadata, None, tuple[str, ...]()
    labels = torch.zeros(len(table), dtype=torch.int64)
    if context and metadata["context"]:
        contexts = (metadata["context"][0], metadata["context"][1])
    elif count := metadata["num_classes"] if num_classes is None else num_classes:
        labels = table.labels()
        names = check_labels(labels, count, metadata["class_names"], table.where)
    features = metadata["features"] and tuple(metadata["features_shape"])
    column = "image" if metadata["content"] == "pixels" else "latent"
    kind = "table" if column == "image" else "latents"
    stored, dtype = metadata["shape"], metadata["dtype"]
    return split_data(
        f"{table.name} ({kind})",
        EncodedTable(table, labels, column, stored, dtype, contexts, features),
        table.num_train,
        held_out,
        names,
        image_size=(shape[1], shape[2]),
        channels=shape[0],
        codec=codec,
        context=contexts,
        text_encoder=metadata.get("text_encoder") if contexts else None,
        features=features,
    )


def _normalize(
    normalization: str, metadata: dict[str, Any], vae: dict[str, Any] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return shift and scale, C numbers each. If `normalization` is "standardize", both come from
    the statistics in a table's `metadata`; if it is "scale", from `vae`, the metadata of an
    autoencoder. Raises ValueError if `vae` is needed and None."""
    mean = metadata["mean"]
    if normalization == "standardize":
        return tuple(mean), tuple(1.0 / value for value in metadata["std"])
    if vae is None:
        raise ValueError(
            "data.normalization=scale needs the autoencoder's factors, but the table names none: "
            "set data.vae=…, or data.normalization=standardize."
        )
    return (vae["shift_factor"],) * len(mean), (vae["scaling_factor"],) * len(mean)


def _open_table(path: str, cache: str | None, num_cached: int, *, pixels: bool) -> ArrowTable:
    """Return the table at `path`. Raises ValueError if it has latents although `pixels` is set, or
    images although `pixels` is not set. For `cache` and `num_cached` see `ArrowTable`."""
    table = ArrowTable(path, cache, num_cached)
    if (table.metadata["content"] == "pixels") is not pixels:
        other = "latents" if pixels else "table"
        raise ValueError(f"data.path={path!r} has {table.metadata['content']}: use data={other}.")
    return table


@dataclass(eq=False)
class EncodedTable(TableDataset):
    """Rows of a table of stored latents [K,C,h,w], moments [K,2C,h,w] or images [C,H,W], with
    labels or contexts. K is 2 if the table has mirrored images, else 1.

    Args:
        table, labels: an `ArrowTable`, and labels int64 [N] of its rows.
        column, shape, dtype: the column to read, `latent` or `image`; shape and type of its cells.
        context: (T, S) if items have contexts, T embeddings of width S, in the place of labels.
        features: shape (K, S, h, w) of an image's features in S channels, if the table has them.
        reads_features: whether items have these features as third element.
    """

    column: str
    shape: Sequence[int]
    dtype: str
    context: tuple[int, int] | None
    features: tuple[int, ...] | None
    reads_features: bool = False

    @property
    def digest(self) -> str:
        """Digest of table.json if the table is in a bucket, where items are slow to read. Empty for
        a table in a folder, whose items `digest_items` reads."""
        return self.table.digest

    def epoch_order(self, generator: torch.Generator) -> Tensor:
        """Return the order int64 [N] in which an epoch visits the items, drawn from `generator`."""
        return self.table.order(self.rows, generator)

    def with_features(self) -> Self:
        """Return the same data set, but each item has a third element: the features of its
        image."""
        part = copy.copy(self)
        part.reads_features = True
        return part

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        """Return (latent or image, label or context), then features if `reads_features` is set."""
        row, condition = int(self.rows[index]), int(self.labels[index])
        item: list[Any] = [self._read(self.column, row, self.shape, self.dtype), condition]
        if self.context is not None:
            item[1] = self._read("context", row, self.context, "float16")
        if self.reads_features and self.features is not None:
            item.append(self._read("features", row, self.features, "float16"))
        return tuple(item)

    def _read(self, column: str, row: int, shape: Sequence[int], dtype: str) -> Tensor:
        content = self.table.cell(column, row)
        return torch.frombuffer(content, dtype=getattr(torch, dtype)).view(*shape)
