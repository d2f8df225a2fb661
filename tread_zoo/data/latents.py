"""Latents of an autoencoder as a table, what a model sees of them, and how they become images.

    x = (z - shift) scale,    z = mean + std noise   (moments)  or as stored

`normalization=standardize` takes shift and scale from the data's own mean and standard deviation,
channel by channel, so that x has mean 0 and deviation 1 with every autoencoder. `scale` takes the
autoencoder's own numbers, which published networks were trained with.

The table (`encode.py` writes it) is a folder:

    table.json              what is in it, and what made it
    train-00000.arrow …     columns latent (bytes), label, and perhaps context (float16 bytes)
    held_out-00000.arrow …

Dimensions: B batch, K copies (2: as it is, mirrored), C channels of a latent (2 C stored where
there are moments), h height, w width.
"""

import bisect
import copy
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.codec import Codec, to_uint8
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.split import check_labels, split_parts
from tread_zoo.data.vae import Vae, load_vae
from tread_zoo.registry import register

if TYPE_CHECKING:
    import datasets

PARTS = ("train", "held_out")
DECODE_BATCH = 8  # images: decoding needs far more memory than the latents
_LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers has it


def split_moments(stored: Tensor, content: str) -> tuple[Tensor, Tensor | None]:
    """Return mean and standard deviation (None for samples), float32 [..., C, h, w], of latents as
    stored; `content` is samples, mean_logvar or mean_std."""
    stored = stored.float()
    if content == "samples":
        return stored, None
    mean, std = stored.chunk(2, dim=-3)
    return mean, (0.5 * std.clamp(*_LOGVAR_RANGE)).exp() if content == "mean_logvar" else std


@dataclass
class Decoder:
    """An autoencoder by name, loaded when it is first needed and checked by its hash.

    Args:
        name: a folder, or a name on the hub.
        sha256: of its weights; None takes whatever is there.
    """

    name: str
    sha256: str | None
    _vae: Vae | None = field(default=None, repr=False, compare=False)

    def load(self) -> Vae:
        """Return the autoencoder.

        Raises:
            ValueError: it is another one.
        """
        if self._vae is None:
            vae = load_vae(self.name)
            if self.sha256 is not None and vae.sha256 != self.sha256:
                raise ValueError(
                    f"vae={self.name!r} is another autoencoder ({vae.kind}, sha256 "
                    f"{vae.sha256[:12]}…) than the latents were made with (sha256 "
                    f"{self.sha256[:12]}…): its images would be wrong. Name the right one."
                )
            self._vae = vae
        return self._vae


@dataclass(frozen=True)
class LatentCodec(Codec):
    """Latents [B,K,C,h,w] or, with moments, [B,K,2C,h,w]. See `Codec` for the methods.

    Args:
        content: samples, mean_logvar or mean_std.
        flips: K is 2, and the second copy is that of the mirrored image.
        normalization: its name, for records.
        shift, scale: C numbers each.
        vae: class and sha256 of the autoencoder that they were made with; None if unknown.
        decoder: where it is; None leaves pictures out.
    """

    content: str
    flips: bool
    normalization: str
    shift: tuple[float, ...]
    scale: tuple[float, ...]
    vae: dict[str, Any] | None
    decoder: Decoder | None

    @property
    def facts(self) -> dict[str, Any]:
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
        return self.decoder is not None

    @property
    def decoded_by(self) -> dict[str, Any] | None:
        if self.decoder is None or self.vae is not None:
            return self.vae if self.decoder else None
        vae = self.decoder.load()
        return {"class": vae.kind, "sha256": vae.sha256}

    def check(self, *, flip: bool = False) -> None:
        if flip and not self.flips:
            raise ValueError(
                "training.horizontal_flip=true, but these latents have no mirrored copies, and a "
                "mirrored latent is not the latent of a mirrored image. Encode with flips=true, or "
                "set training.horizontal_flip=false."
            )
        if self.decoder is not None:
            import diffusers  # noqa: F401  (before the training, not after)

    def prepare(self, device: torch.device) -> None:
        if self.decoder is not None:
            self.decoder.load().to(device)

    def model_shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return (B, C, h, w) for (B, K, C or 2C, h, w)."""
        batch, _, channels, height, width = stored
        return batch, channels // (1 if self.content == "samples" else 2), height, width

    def draw(self, stored: Sequence[int], generator: torch.Generator) -> Tensor | None:
        """Return the noise of moments; samples have none."""
        if self.content == "samples":
            return None
        return torch.randn(self.model_shape(stored), generator=generator)

    def to_model(
        self,
        stored: Tensor,
        *,
        device: torch.device,
        noise: Tensor | None = None,
        flip: Tensor | None = None,
    ) -> Tensor:
        """Return normalised latents, those of moments at their `noise`."""
        chosen = stored[:, 0]
        if flip is not None:
            chosen = torch.where(flip.view(-1, 1, 1, 1), stored[:, 1], chosen)
        z, std = split_moments(chosen.to(device), self.content)
        if std is not None and noise is not None:
            z = z + std * noise.to(device)
        return (z - _column(self.shift, z)) * _column(self.scale, z)

    def to_pixels(self, x: Tensor, *, device: torch.device) -> Tensor:
        """Return decoded images; without an autoencoder, a preview: the first three channels (or
        the first) as colours, 3 standard deviations to the brightest and darkest."""
        if self.decoder is None:
            return to_uint8(x[:, : 3 if x.shape[1] >= 3 else 1] / 3).cpu()
        vae = self.decoder.load().to(device)
        parts = self.to_latents(x).split(DECODE_BATCH)
        return torch.cat([to_uint8(vae.decode(z.to(device))).cpu() for z in parts])

    def to_latents(self, x: Tensor) -> Tensor:
        """Return the autoencoder's own latents, float32, of x: z = x / scale + shift."""
        return x.float() / _column(self.scale, x) + _column(self.shift, x)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, 1, 1)


def normalizing(
    normalization: str, *, mean: Sequence[float], std: Sequence[float], vae: dict[str, Any] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return shift and scale, C numbers each.

    Args:
        normalization: standardize or scale.
        mean, std: of the latents, by channel.
        vae: has scaling_factor and shift_factor.

    Raises:
        ValueError: a constant channel, or no autoencoder to take factors from.
    """
    if normalization == "scale":
        if vae is None:
            raise ValueError(
                "data.normalization=scale takes the factor of the autoencoder, and none is named: "
                "set data.vae=…, or data.normalization=standardize."
            )
        return (vae["shift_factor"],) * len(mean), (vae["scaling_factor"],) * len(mean)
    if not min(std) > 0:
        raise ValueError(
            "data.normalization=standardize: a channel of the latents is constant, and cannot be "
            "scaled to a standard deviation of 1. Set data.normalization=scale."
        )
    return tuple(mean), tuple(1.0 / value for value in std)


def imported_codec(vae: str, num_channels: int) -> LatentCodec:
    """Return the codec of a network from elsewhere on latents of C channels, scaled as `vae` says;
    for `vae=none` they are left as they are.

    Raises:
        ValueError: the autoencoder has other channels.
    """
    zeros, ones = (0.0,) * num_channels, (1.0,) * num_channels
    if vae == "none":
        return LatentCodec("samples", False, "scale", zeros, ones, None, None)
    loaded = load_vae(vae)
    if loaded.latent_channels != num_channels:
        raise ValueError(
            f"vae={vae!r} has latents of {loaded.latent_channels} channels, and the network of "
            f"{num_channels}; name the autoencoder that it was trained with."
        )
    shift, scale = normalizing("scale", mean=zeros, std=zeros, vae=loaded.facts)
    facts = {"class": loaded.kind, "sha256": loaded.sha256}
    decoder = Decoder(vae, loaded.sha256, loaded)
    return LatentCodec("samples", False, "scale", shift, scale, facts, decoder)


def restore_codec(facts: dict[str, Any], vae: str) -> LatentCodec:
    """Return the codec of a checkpoint's `facts`; its autoencoder is at `vae` (`none`: nowhere)."""
    return LatentCodec(
        content=facts["content"],
        flips=False,
        normalization=facts["normalization"],
        shift=tuple(facts["shift"]),
        scale=tuple(facts["scale"]),
        vae=facts["vae"],
        decoder=_decoder_at(vae, facts["vae"]),
    )


def _decoder_at(name: str, vae: dict[str, Any] | None) -> Decoder | None:
    return None if name == "none" else Decoder(name, vae["sha256"] if vae else None)


@register("data", "latents")
def latents(
    path: str,
    normalization: Literal["standardize", "scale"] = "standardize",
    vae: str | None = None,
    held_out: Annotated[float, Field(ge=0, lt=1)] | None = None,
    num_classes: NonNegativeInt | None = None,
    context: bool = True,
) -> ImageData:
    """Return the latents that scripts/encode.py or scripts/convert_latents.py wrote.

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
    table, num_train, facts = open_table(root)
    contexts = tuple(facts["context"]) if context and facts["context"] else None
    count = 0 if contexts else facts["num_classes"] if num_classes is None else num_classes
    labels = torch.zeros(len(table), dtype=torch.int64)
    if count:
        labels = torch.from_numpy(np.array(table.with_format("numpy")[:]["label"], np.int64))
        check_labels(labels, count, str(root))
    own = facts["vae"]
    if own is None and vae not in (None, "none"):
        own = load_vae(vae).facts
    copies, channels, height, width = facts["shape"]
    shift, scale = normalizing(normalization, mean=facts["mean"], std=facts["std"], vae=own)
    codec = LatentCodec(
        content=facts["content"],
        flips=copies == 2,
        normalization=normalization,
        shift=shift,
        scale=scale,
        vae={key: own[key] for key in ("class", "sha256")} if own else None,
        decoder=_decoder_at(vae or (own["name"] if own else "none"), own),
    )
    if own and codec.model_shape((1, *facts["shape"]))[1] != own["latent_channels"]:
        raise ValueError(
            f"data.path={path!r} has {channels} channels of {facts['content']}, and the latents of "
            f"vae={own['name']!r} have {own['latent_channels']}."
        )
    whole = LatentTable(table, labels, facts["shape"], facts["dtype"], contexts)
    train, unseen = split_parts(labels, num_train, held_out, default=0.1)
    names = facts["class_names"]
    return ImageData(
        name=f"{root.name} (latents)",  # never mistaken for a built-in source
        train=whole.subset(train),
        held_out=whole.subset(unseen) if len(unseen) else None,
        image_size=(height, width),
        channels=codec.model_shape((1, *facts["shape"]))[1],
        num_classes=count,
        class_names=tuple(names) if len(names) == count else tuple(map(str, range(count))),
        codec=codec,
        context=contexts,
    )


def open_table(root: Path) -> tuple["datasets.Dataset", int, dict[str, Any]]:
    """Return the table in a folder, training part first, the length of that, and table.json.

    Raises:
        ValueError: it is not finished.
    """
    import datasets

    facts = json.loads((root / "table.json").read_text())
    if "mean" not in facts:
        raise ValueError(f"data.path={str(root)!r} is not finished: encode with the same command.")
    parts = {
        part: [datasets.Dataset.from_file(str(root / name)) for name in facts["parts"][part]]
        for part in PARTS
    }
    table = datasets.concatenate_datasets([one for part in PARTS for one in parts[part]])
    return table, sum(map(len, parts["train"])), facts


class LatentTable(Dataset):
    """Some rows of a table of latents, [K,C',h,w] as stored, with their labels or contexts.

    They are read straight from the memory-mapped Arrow chunks: a few microseconds each.

    Args:
        table: with the columns latent and context, of bytes.
        labels: int64 [N].
        shape, dtype: of a latent.
        context: T and S, where contexts are the condition.
    """

    def __init__(
        self,
        table: "datasets.Dataset",
        labels: Tensor,
        shape: Sequence[int],
        dtype: str,
        context: tuple[int, int] | None = None,
    ):
        self.table, self.labels, self.rows = table, labels, torch.arange(len(table))
        self.shape, self.dtype, self.context = tuple(shape), dtype, context
        self._columns: dict[str, tuple[list[Any], list[int]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_columns": {}}

    def subset(self, rows: Tensor) -> "LatentTable":
        """Return the items `rows` int64 [K], on the same table."""
        part = copy.copy(self)
        part.rows, part.labels, part._columns = self.rows[rows], self.labels[rows], {}
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Return (latent, label or context). Raises ValueError if its bytes are not the shape's."""
        row = int(self.rows[index])
        latent = self._read("latent", row, self.shape, self.dtype)
        if self.context is None:
            return latent, int(self.labels[index])
        return latent, self._read("context", row, self.context, "float16")

    def _read(self, column: str, row: int, shape: tuple[int, ...], dtype: str) -> Tensor:
        if column not in self._columns:
            chunks = self.table.data.column(column).chunks
            self._columns[column] = chunks, list(itertools.accumulate(map(len, chunks)))
        chunks, ends = self._columns[column]
        number = bisect.bisect_right(ends, row)
        chunk = chunks[number]
        content = bytearray(chunk[row - ends[number] + len(chunk)].as_buffer())
        values = torch.frombuffer(content, dtype=getattr(torch, dtype))
        if values.numel() != math.prod(shape):
            raise ValueError(f"{column} of row {row} has {len(content)} bytes, not {list(shape)}")
        return values.view(shape)

    def item_name(self, index: int) -> str:
        """Return the row of item `index`."""
        return f"row {int(self.rows[index])}"
