"""The data source `latents`: stored latents of any known format, as a model sees them.

Items are read as they lie, by random access; what is random (which copy, the noise of moments) is
drawn with all else that a training step draws, in `LatentCodec.to_model`.

Dimensions: N samples, K copies, C channels (C' as stored), h height, w width.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.contexts import WithContexts, check_context_options
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.from_shards import count_classes
from tread_zoo.data.latents.codec import (
    LatentCodec,
    decoder_at,
    normalizing,
    num_moments,
    split_moments,
)
from tread_zoo.data.latents.formats import (
    Items,
    Stored,
    guess_format,
    read_npy_folder,
    read_npz,
    read_safetensors,
    read_shards,
)
from tread_zoo.data.latents.from_lmdb import read_lmdb
from tread_zoo.data.latents.manifest import VERIFY, Manifest
from tread_zoo.data.latents.vae import load_vae
from tread_zoo.data.split import split_held_out
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register

FORMATS = ("auto", "shards", "npz", "npy_folder", "safetensors", "lmdb")
HELD_OUT = 0.1
_TRIED = 1000  # items whose shape is asked for, before the data are given up
MEASURED = 10_000  # latents, evenly spaced, of formats without statistics


@register("data", "latents")
def latents(
    path: str,
    format: str = "auto",
    content: str | None = None,
    normalization: str = "standardize",
    vae: str | None = None,
    held_out: float | None = None,
    num_classes: int | None = None,
    verify: str = "size",
    context: bool = True,
) -> ImageData:
    """Return the latents at `path`.

    path: a folder, or an .npz file.
    format: `auto`, or one of `shards`, `npz`, `npy_folder`, `safetensors`, `lmdb`; see
      `formats.py`.
    content: `samples`, `mean_logvar` or `mean_std`, where the files do not tell.
    normalization: `standardize` (mean 0, deviation 1 by channel) or `scale` (the autoencoder's).
    vae: a diffusers autoencoder for pictures and scores, a folder or a hub's name; not given, that
      of the manifest; `none` goes without pictures.
    held_out: the fraction split off (0.1) where the files have no such part of their own.
    num_classes: the manifest's or the largest label + 1 unless given; 0 drops the labels.
    verify: `size`, or `sha256`, which reads every byte of the shards once, first.
    context: contexts, where the manifest has any, are the condition; false drops them.

    Raises ValueError, naming the file and the option, for whatever does not fit this.
    """
    root = Path(path).expanduser()
    stored = _read(root, format, verify)
    if stored.unlabelled is not None and num_classes != 0:
        raise ValueError(stored.unlabelled)
    stored_shape = _shape_of(stored.items)
    chosen = _content(stored, content, root, stored_shape[1])
    channels = stored_shape[1] // num_moments(chosen)
    name, facts = _autoencoder(stored.manifest, vae)
    _check_channels(stored_shape[1], chosen, facts, root)
    manifest = stored.manifest
    if not isinstance(context, bool):
        raise ValueError(f"data.context={context!r} must be true or false for latents.")
    contexts = stored.contexts if context else None
    if contexts is not None:
        check_context_options("of the manifest; data.context=false drops them", None, num_classes)
    if num_classes is None and manifest is not None:
        num_classes = manifest.num_classes
    num_classes = count_classes([stored.labels], num_classes, root)
    labels = stored.labels if num_classes else np.zeros(len(stored.items), np.int64)
    train, test = _split(stored, labels, held_out)
    mean, std = stored.mean, stored.std
    if mean is None or std is None:
        mean, std = measure(stored.items, train, chosen)
    shift, scale = normalizing(normalization, mean=mean, std=std, vae=facts)

    def subset(indices: np.ndarray) -> Dataset:
        found = LatentDataset(stored.items, indices, labels[indices], stored_shape)
        return found if contexts is None else WithContexts(found, contexts, indices)

    named = manifest is not None and len(manifest.class_names) == num_classes
    return ImageData(
        name=f"{root.name} (latents)",  # never mistaken for a built-in source
        train=subset(train),
        held_out=subset(test) if len(test) else None,
        image_size=(stored_shape[2], stored_shape[3]),
        channels=channels,
        num_classes=num_classes,
        class_names=manifest.class_names
        if named and manifest is not None
        else tuple(str(label) for label in range(num_classes)),
        codec=LatentCodec(
            content=chosen,
            flips=stored_shape[0] == 2,
            normalization=normalization,
            shift=shift,
            scale=scale,
            vae={key: facts[key] for key in ("class", "sha256")} if facts else None,
            decoder=decoder_at(name, facts),
        ),
        context=manifest.context if manifest is not None and contexts is not None else None,
    )


class LatentDataset(Dataset):
    """Some of the items, [K,C',h,w] as stored, with their labels.

    shape: that each must have.
    """

    def __init__(self, items: Items, indices: np.ndarray, labels: np.ndarray, shape: Sequence[int]):
        self.items, self.indices, self.labels, self.shape = items, indices, labels, tuple(shape)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (latent, label). Raises ValueError naming an unreadable or odd one."""
        found = self.items[int(self.indices[index])]
        if tuple(found.shape) != self.shape:
            raise ValueError(
                f"{self.item_name(index)} has shape {list(found.shape)}, and the first "
                f"{list(self.shape)} (copies, channels, height, width); all must be alike."
            )
        return found, int(self.labels[index])

    def item_name(self, index: int) -> str:
        """Return the file or the shard of item `index`, and its place there."""
        return getattr(self.items, "item_name", "latent {}".format)(int(self.indices[index]))

    def lost_items(self) -> list[int]:
        """Return the items that damaged shards lack."""
        return np.flatnonzero(np.isin(self.indices, getattr(self.items, "lost", ()))).tolist()


def measure(
    items: Items, indices: np.ndarray, content: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation by channel, in float64, of up to `MEASURED` evenly spaced items.

    Those that cannot be read are passed over. Raises ValueError if that is all of them.
    """
    count = min(len(indices), MEASURED)
    total, unread = Moments(), None
    for number in range(count):
        try:
            found = items[int(indices[number * len(indices) // count])]
        except ValueError as error:
            unread = error
            continue
        total.add(found[None], content)
    if not total.count:
        raise ValueError(f"none of {count} latents can be read: {unread}") from unread
    return total.result()


class Moments:
    """Mean and deviation by channel, streamed in float64; of moments, over what they draw:
    E[z] = E[mean], E[z^2] = E[mean^2] + E[std^2]."""

    def __init__(self) -> None:
        self.count, self.total, self.square = 0, np.zeros(1), np.zeros(1)

    def add(self, stored: Tensor, content: str) -> None:
        """Take in [B,K,C',h,w]."""
        mean, spread = split_moments(stored, content)
        mean = mean.double()
        square = mean.square() if spread is None else mean.square() + spread.double().square()
        axes = (0, 1, 3, 4)
        self.count += mean.numel() // mean.shape[2]
        self.total = self.total + mean.sum(axes).numpy()
        self.square = self.square + square.sum(axes).numpy()

    def result(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation, C numbers each."""
        mean = self.total / self.count
        variance = np.maximum(self.square / self.count - mean**2, 0)
        return tuple(mean.tolist()), tuple(np.sqrt(variance).tolist())


def _read(root: Path, format: str, verify: str) -> Stored:
    if format not in FORMATS:
        raise unknown_name("data.format", format, FORMATS)
    if verify not in VERIFY:
        raise unknown_name("data.verify", verify, VERIFY)
    chosen = guess_format(root) if format == "auto" else format
    if chosen != "shards" and verify != "size":
        raise ValueError(f"data.verify={verify} is for format=shards; {chosen} has no checksums.")
    if chosen == "shards":
        stored = read_shards(root, verify)
    else:
        readers = {
            "npz": read_npz, "npy_folder": read_npy_folder, "safetensors": read_safetensors,
            "lmdb": read_lmdb,
        }  # fmt: skip
        stored = readers[chosen](root)
    if not len(stored.items):
        raise ValueError(f"data.path={str(root)!r} has no latents.")
    return stored


def _shape_of(items: Items) -> tuple[int, ...]:
    """Return [K,C',h,w] of the first item that can be read. Raises ValueError if none can."""
    lost, unread = set(np.asarray(getattr(items, "lost", ()), int).tolist()), None
    for item in (item for item in range(len(items)) if item not in lost):
        try:
            return tuple(items[item].shape)
        except ValueError as error:
            unread = unread or error
            if item >= _TRIED:
                break
    raise ValueError(f"none of the first latents can be read: {unread}") from unread


def _content(stored: Stored, content: str | None, root: Path, channels: int) -> str:
    """Return what the `channels` are, from the files or from the option."""
    if content is None and stored.content is None:
        raise ValueError(
            f"data.path={str(root)!r} does not tell what its {channels} channels "
            "are: set data.content=samples, mean_logvar or mean_std."
        )
    chosen = content or stored.content
    assert chosen is not None
    if stored.manifest is not None and chosen != stored.content:
        raise ValueError(
            f"data.content={chosen}, but the manifest says {stored.content}; leave it out."
        )
    if num_moments(chosen) == 2 and channels % 2:
        raise ValueError(
            f"data.content={chosen} wants an even number of channels, mean and spread; "
            f"data.path={str(root)!r} has {channels}."
        )
    return chosen


def _autoencoder(manifest: Manifest | None, vae: str | None) -> tuple[str, dict[str, Any] | None]:
    """Return where the autoencoder is (`none`: nowhere) and what is known of it."""
    if manifest is not None:
        return vae or manifest.vae["name"], manifest.vae
    if vae is None or vae == "none":
        return "none", None
    return vae, load_vae(vae).facts


def _check_channels(stored: int, content: str, vae: dict[str, Any] | None, root: Path) -> None:
    if vae is None or stored // num_moments(content) == vae["latent_channels"]:
        return
    hint = ""
    if content == "samples" and stored == 2 * vae["latent_channels"]:
        hint = " They look like moments: set data.content=mean_logvar or mean_std."
    raise ValueError(
        f"data.path={str(root)!r} has {stored} channels as data.content={content}; the autoencoder "
        f"{vae['name']!r} has latents of {vae['latent_channels']}.{hint}"
    )


def _split(
    stored: Stored, labels: np.ndarray, held_out: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and the held-out part."""
    if stored.manifest is None:
        fraction = HELD_OUT if held_out is None else held_out
        kept, split_off = split_held_out(torch.from_numpy(labels), fraction)
        return kept.numpy(), split_off.numpy()
    if held_out is not None:
        raise ValueError(
            f"data.held_out={held_out:g}, but these latents were split when they were encoded; "
            "leave it out, or encode with data.held_out=…"
        )
    every, first = np.arange(len(labels)), stored.manifest.count("train")
    return every[:first], every[first:]
