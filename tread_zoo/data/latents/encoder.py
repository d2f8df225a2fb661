"""One process's work: read images in batches, encode them, write each shard and its record.

An image that cannot be read is left out, listed with its shard, and counted.

Dimensions: B batch, K copies, C channels of a latent, H, W of an image, h, w of a latent.
"""

import io
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tread_zoo.data.contexts import to_half
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.latents.formats import numpy_dtype
from tread_zoo.data.latents.manifest import CONTEXT, DTYPES, LATENT, PARTS, VERIFY, ShardFacts
from tread_zoo.data.latents.progress import Shard, check_share, record_file, write_record
from tread_zoo.data.latents.source import Moments
from tread_zoo.data.latents.vae import Vae
from tread_zoo.data.loader import CorruptItem, read_item
from tread_zoo.data.pictures import resize_and_crop
from tread_zoo.data.ranges import to_model_range, to_uint8
from tread_zoo.data.shards import write_shard
from tread_zoo.errors import unknown_name
from tread_zoo.kinds import check_fields
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

CONTENTS = ("auto", "moments", "samples", "mode")
PSNR_IMAGES = 16
_TOLD = 20  # lines of the log, at most, of an encoding without a terminal


@dataclass(frozen=True)
class EncodingOptions:
    """How to encode.

    Args:
        content: `moments` keeps mean and logvar, and training draws; `samples` draws once; `mode`
            takes the mean; `auto` is moments where the autoencoder has them, else mode.
        flips: encode the mirrored image beside each.
        dtype: float16, bfloat16 or float32 on the disk.
        image_size: resize the shorter side to it and crop the centre; None leaves images alone.
        batch_size: images at a time.
        shard_size: images a shard.
        num_workers: processes that read images.
        max_corrupt_share: share of the images that may be unreadable, each left out; past it the
            encoding stops.
        verify: how shards that are there already are compared with what was written: `size`, or
            `sha256`, which reads every byte.

    Raises:
        ValueError: a value that cannot work.
    """

    content: str = "auto"
    flips: bool = False
    dtype: str = "float16"
    image_size: int | None = None
    batch_size: int = 16
    shard_size: int = 1000
    num_workers: int = 0
    max_corrupt_share: float = 0.001
    verify: str = "size"

    def __post_init__(self) -> None:
        check_fields("", self)
        if self.content not in CONTENTS:
            raise unknown_name("content", self.content, CONTENTS)
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.verify not in VERIFY:
            raise unknown_name("verify", self.verify, VERIFY)
        if not 0 <= self.max_corrupt_share <= 1:
            raise ValueError(
                f"max_corrupt_share={self.max_corrupt_share!r} must lie between 0 and 1."
            )
        for name, least in (
            ("image_size", 1),
            ("batch_size", 1),
            ("shard_size", 1),
            ("num_workers", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value!r} must be {least} or more.")

    def resolved_content(self, vae: Vae) -> str:
        """Return moments, samples or mode.

        Raises:
            ValueError: the autoencoder has no distribution to keep or to draw from.
        """
        if self.content == "auto":
            return "moments" if vae.has_posterior else "mode"
        if self.content != "mode" and not vae.has_posterior:
            raise ValueError(
                f"content={self.content}, but {vae.kind} gives one latent an image, and no "
                "distribution; set content=mode."
            )
        return self.content


class Encoder:
    """An autoencoder with options; counts its images and the seconds that it itself took."""

    def __init__(
        self, vae: Vae, options: EncodingOptions, content: str, precision: str, num_images: int
    ):
        self.vae, self.options, self.content, self.precision = vae, options, content, precision
        self.num_images, self.left_out = num_images, list[CorruptItem]()
        self.device = next(vae.network.parameters()).device
        self.images, self.vae_time = 0, 0.0

    @property
    def stored_content(self) -> str:
        """What the channels are to `split_moments`."""
        return "samples" if self.content == "mode" else self.content

    def check_share(self) -> None:
        """Raise `ValueError` if more images were left out than may be."""
        check_share(self.left_out, self.num_images, self.options.max_corrupt_share)

    def write(
        self, data: ImageData, missing: Sequence[Shard], out: Path, *, rank: int, num_ranks: int
    ) -> None:
        """Encode this process's share of the `missing` shards, each with its record."""
        from tqdm.auto import tqdm

        shards = missing[rank::num_ranks]
        total = sum(shard.last - shard.first for shard in shards)
        terminal = sys.stderr.isatty()
        began, every = time.perf_counter(), max(1, len(shards) // _TOLD)
        with tqdm(total=total, unit="image", disable=rank != 0 or not terminal) as bar:
            written = 0
            for part in PARTS:
                chosen = [shard for shard in shards if shard.part == part]
                if not chosen:
                    continue
                batches = self._batches(part_of(data, part), self._plan(chosen))
                for shard in chosen:
                    self._write_shard(shard, batches, out, data, bar)
                    written += 1
                    if rank == 0 and (terminal or written % every == 0):
                        done = sum(record_file(out, one).exists() for one in missing)
                        bar.set_postfix_str(f"all processes: {done}/{len(missing)} shards")
                        speed = self.images / (time.perf_counter() - began)
                        if not terminal:
                            logger.info(
                                "%-9s %d of %d shards (%.0f %%), %.1f images/s in this process",
                                "encoding", done, len(missing), 100 * done / len(missing), speed,
                            )  # fmt: skip

    def _plan(self, shards: Sequence[Shard]) -> list[list[int]]:
        """Return the batches of all shards, each shard's last one shorter."""
        size = self.options.batch_size
        return [
            list(range(first, min(first + size, shard.last)))
            for shard in shards
            for first in range(shard.first, shard.last, size)
        ]

    def _batches(self, dataset: Dataset, plan: list[list[int]]) -> Iterator["_Batch"]:
        """Yield batches, read ahead by workers."""
        if self.options.image_size is not None:
            dataset = _Resized(dataset, self.options.image_size)
        workers = self.options.num_workers
        # With batch_size=None what the sampler gives, a list of indices, is handed to the reader.
        return iter(
            DataLoader(
                _Reader(dataset), sampler=plan, batch_size=None, num_workers=workers,
                collate_fn=_as_it_is,
            )
        )  # fmt: skip

    def _write_shard(
        self, shard: Shard, batches: Iterator["_Batch"], out: Path, data: ImageData, bar: Any
    ) -> None:
        moments, labels, left_out = Moments(), list[int](), list[CorruptItem]()

        def samples() -> Iterator[tuple[str, dict[str, bytes]]]:
            for _ in range(shard.first, shard.last, self.options.batch_size):
                batch = next(batches)
                left_out.extend(batch.corrupt)
                self._leave_out(batch.corrupt)
                if batch.items:
                    stored = self.encode(torch.stack(batch.images), shard.part, batch.items)
                    moments.add(stored, self.stored_content)
                    rows = zip(batch.items, _as_arrays(stored), batch.targets, strict=True)
                    for item, latent, target in rows:
                        labels.append(int(target) if data.num_classes else -1)
                        name = f"{shard.part} image {item}"
                        members = self._members(latent, target, data, name)
                        yield f"{shard.part}_{item:09d}", members
                bar.update(len(batch.items) + len(batch.corrupt))

        written = write_shard(out / shard.name, samples(), LATENT)
        arrays = {
            "label": np.array(labels, np.int64),
            "offset": written.offset,
            "size": written.size,
            "num_bytes": np.array(written.num_bytes),
            "sha256": np.array(written.sha256),
            "total": moments.total,
            "square": moments.square,
            "summed": np.array(moments.count),
        }
        write_record(out, shard, arrays, left_out)

    def _leave_out(self, corrupt: Sequence[CorruptItem]) -> None:
        for item in corrupt:
            logger.warning("left out  %s. %s", item.name, item.reason.splitlines()[0])
            self.left_out.append(item)
            self.check_share()

    def _members(
        self, latent: np.ndarray, target: Any, data: ImageData, name: str
    ) -> dict[str, bytes]:
        """Return a sample's content by suffix, of its copies [K,C',h,w] and label or context."""
        members = {LATENT: _npy(latent if self.options.flips else latent[0])}
        if data.num_classes > 0:
            members["cls"] = b"%d" % int(target)
        if data.context is not None:
            members[CONTEXT] = _npy(to_half(target, f"of {name}").numpy())
        return members

    def encode(self, images: Tensor, part: str, items: Sequence[int]) -> Tensor:
        """Return what is stored of images uint8 [B,C,H,W], which `items` are: [B,K,C',h,w].

        Raises:
            ValueError: latents that are not finite, or beyond what the dtype holds.
        """
        began = time.perf_counter()
        x = to_model_range(images.to(self.device))
        copies = []
        for number, one in enumerate((x, x.flip(-1)) if self.options.flips else (x,)):
            with autocast(self.device, self.precision):
                mean, logvar = self.vae.encode(one)
            if self.content == "mean_logvar" and logvar is not None:
                mean = torch.cat([mean, logvar], dim=1)
            elif self.content == "samples" and logvar is not None:
                noise = _noise(mean.shape, part, items, number).to(mean)
                mean = mean + (0.5 * logvar).exp() * noise
            copies.append(mean)
        stored = torch.stack(copies, dim=1).to(getattr(torch, self.options.dtype)).cpu()
        self.vae_time += time.perf_counter() - began
        self.images += len(images)
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"latents of the {part} images {items[0]} … {items[-1]} are not finite "
                f"as {self.options.dtype} in precision={self.precision}; set dtype=float32 and "
                "precision=fp32, or look at these images."
            )
        return stored

    def psnr(self, data: ImageData, parts: dict[str, list[ShardFacts]]) -> tuple[float, int]:
        """Return the mean PSNR in dB of decoded latents against their images, and of how many."""
        part = "train" if data.held_out is None else "held_out"
        unread = {item.index for facts in parts[part] for item in facts.left_out}
        whole = (item for item in range(count_of(part_of(data, part))) if item not in unread)
        items, size = list(islice(whole, PSNR_IMAGES)), self.options.batch_size
        plan = [items[first : first + size] for first in range(0, len(items), size)]
        channels, values = self.vae.latent_channels, list[float]()
        for batch in self._batches(part_of(data, part), plan):
            if batch.items:
                images = torch.stack(batch.images)
                z = self.encode(images, part, batch.items)[:, 0, :channels].float()
                decoded = to_uint8(self.vae.decode(z.to(self.device))).cpu()
                values += psnr(decoded, images).tolist()
        return sum(values) / max(len(values), 1), len(values)


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Return 10 log10(255^2 / mean squared difference) in dB, float64 [B], of uint8 [B,C,H,W].

    At most 100 dB, which equal images get.
    """
    gap = (images.double() - others.double()).square().mean(dim=(1, 2, 3))
    return 10 * (255**2 / gap).log10().clamp(max=10.0)


@dataclass(frozen=True)
class _Batch:
    """`items` of a part, their images uint8 [C,H,W] and labels or contexts; and the corrupt."""

    items: list[int]
    images: list[Tensor]
    targets: list[Any]
    corrupt: list[CorruptItem]


class _Reader(Dataset):
    """Reads whole batches, without what cannot be read."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, indices: Sequence[int]) -> _Batch:
        batch = _Batch([], [], [], [])
        for index in indices:
            found = read_item(self.dataset, index)
            if isinstance(found, CorruptItem):
                batch.corrupt.append(found)
            else:
                batch.items.append(index)
                batch.images.append(found[0])
                batch.targets.append(found[1])
        return batch


def _as_it_is(batch: Any) -> Any:
    return batch


class _Resized(Dataset):
    """Images resized to squares, as `image_folder` does it."""

    def __init__(self, dataset: Dataset, side: int):
        self.dataset, self.side = dataset, side

    def __len__(self) -> int:
        return count_of(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image, label = self.dataset[index]
        pixels = image.permute(1, 2, 0).numpy()
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        array = np.array(resize_and_crop(picture, self.side))
        return torch.from_numpy(array).view(self.side, self.side, -1).permute(2, 0, 1), label

    def item_name(self, index: int) -> str:
        """Return what the image is called."""
        return getattr(self.dataset, "item_name", "item {}".format)(index)


def part_of(data: ImageData, part: str) -> Dataset:
    """Return a part of the data; an empty list stands for what was not held out."""
    found = data.train if part == "train" else data.held_out
    return [] if found is None else found  # type: ignore[return-value]


def count_of(dataset: Dataset) -> int:
    return len(dataset)  # type: ignore[arg-type]


def _noise(shape: Sequence[int], part: str, items: Sequence[int], copy: int) -> Tensor:
    """Return noise [B,C,h,w] of items: a function of the item and its copy."""
    return torch.stack([
        torch.randn(*shape[1:], generator=make_generator(f"encode {part}", item, copy))
        for item in items
    ])  # fmt: skip


def _as_arrays(stored: Tensor) -> np.ndarray:
    """Return [B,K,C',h,w] as NumPy keeps it: bfloat16 as its bits."""
    if stored.dtype == torch.bfloat16:
        return stored.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return stored.numpy()


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.ascontiguousarray(array))
    return stream.getvalue()
