"""Encode images into a folder of latents (`manifest.py`), shard by shard, on one or more processes.

Shard s of a part holds its items s * shard_size …; process r of n encodes every n-th of those that
are missing. A shard is written beside and renamed, its record after it: what is whole is kept, and
the same command again does the rest and gives the same bytes. The main process then puts the
records together into the manifest.

Dimensions: B batch, K copies, C channels of a latent, H, W of an image, h, w of a latent.
"""

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tread_zoo.data.codec import PixelCodec
from tread_zoo.data.contexts import to_half
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.latents.formats import numpy_dtype
from tread_zoo.data.latents.manifest import (
    CONTEXT,
    DTYPES,
    LATENT,
    NAME,
    PARTS,
    Manifest,
    ShardFacts,
    read_manifest,
)
from tread_zoo.data.latents.source import Moments
from tread_zoo.data.latents.vae import Vae
from tread_zoo.data.pictures import resize_and_crop
from tread_zoo.data.ranges import to_model_range, to_uint8
from tread_zoo.data.shards import open_index, save_columns, write_shard
from tread_zoo.errors import unknown_name
from tread_zoo.kinds import check_fields
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

CONTENTS = ("auto", "moments", "samples", "mode")
PLAN = "encoding.json"  # what is being encoded; gone when the manifest is there
PSNR_IMAGES = 16


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

    def __post_init__(self) -> None:
        check_fields("", self)
        if self.content not in CONTENTS:
            raise unknown_name("content", self.content, CONTENTS)
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
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


@dataclass(frozen=True)
class Shard:
    """One shard to be: items first … last - 1 of a part."""

    part: str
    name: str
    first: int
    last: int


@dataclass(frozen=True)
class Encoded:
    """What a run of `encode_latents` did.

    `images` of this process, images per second, and the share of the time that the autoencoder
    itself took: its own speed, reached to this share.
    """

    manifest: Manifest | None  # the main process's
    images: int
    images_per_s: float
    vae_share: float


def encode_latents(
    data: ImageData,
    vae: Vae,
    out: Path,
    options: EncodingOptions,
    *,
    source: dict[str, Any],
    precision: str = "fp32",
    rank: int = 0,
    num_ranks: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> Encoded:
    """Encode all of `data` that is not yet in `out`.

    Args:
        data: images.
        vae: on the device to encode on.
        out: the folder.
        options: how.
        source: name and options of the data, for the record.
        precision: resolved, see `tread_zoo.runtime`.
        rank, num_ranks: of this process.
        wait: returns when all processes have called it.

    Raises:
        ValueError: data or options that do not fit the autoencoder, or the folder holds others.
    """
    plan = _plan(data, vae, options, source, precision)
    out.mkdir(parents=True, exist_ok=True)
    _check_same(out, plan)
    if (out / NAME).exists():
        logger.info("%-9s %s is complete; nothing to do", "done", out)
        return Encoded(read_manifest(out), 0, 0.0, 0.0)
    shards = plan_shards(plan["counts"], options.shard_size)
    missing = [shard for shard in shards if not _is_done(out, shard)]
    if rank == 0:
        _write_json(out / PLAN, plan)
    wait()  # all have seen the same shards before there are more
    if rank == 0:
        there = len(shards) - len(missing)
        logger.info("%-9s %d of %d shards are there already", "encoding", there, len(shards))
    encoder = _Encoder(vae, options, plan["content"], precision)
    began = time.perf_counter()
    encoder.write(data, missing[rank::num_ranks], out, show=rank == 0)
    taken = max(time.perf_counter() - began, 1e-9)
    wait()
    images, share = encoder.images, encoder.vae_time / taken
    manifest = _finish(data, encoder, out, plan, shards) if rank == 0 else None
    return Encoded(manifest, images, images / taken, share)


def plan_shards(counts: dict[str, int], shard_size: int) -> list[Shard]:
    """Return the shards of both parts, in order."""
    return [
        Shard(part, f"{part}-{number:06d}.tar", first, min(first + shard_size, counts[part]))
        for part in PARTS
        for number, first in enumerate(range(0, counts[part], shard_size))
    ]


class _Encoder:
    """An autoencoder with options; counts its images and the seconds that it itself took."""

    def __init__(self, vae: Vae, options: EncodingOptions, content: str, precision: str):
        self.vae, self.options, self.content, self.precision = vae, options, content, precision
        self.device = next(vae.network.parameters()).device
        self.images, self.vae_time = 0, 0.0

    @property
    def stored_content(self) -> str:
        """What the channels are to `split_moments`."""
        return "samples" if self.content == "mode" else self.content

    def write(self, data: ImageData, shards: Sequence[Shard], out: Path, *, show: bool) -> None:
        """Encode `shards`, each with its record."""
        from tqdm.auto import tqdm

        total = sum(shard.last - shard.first for shard in shards)
        with tqdm(total=total, unit="image", disable=not (show and sys.stderr.isatty())) as bar:
            for part in PARTS:
                chosen = [shard for shard in shards if shard.part == part]
                if chosen:
                    batches = self._batches(_part(data, part), chosen)
                    for shard in chosen:
                        self._write_shard(shard, batches, out, data, bar)

    def _batches(
        self, dataset: Dataset, shards: Sequence[Shard]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of all shards, each shard's last one shorter: read ahead by workers."""
        size = self.options.batch_size
        plan = [
            list(range(first, min(first + size, shard.last)))
            for shard in shards
            for first in range(shard.first, shard.last, size)
        ]
        if self.options.image_size is not None:
            dataset = _Resized(dataset, self.options.image_size)
        workers = self.options.num_workers
        return iter(DataLoader(dataset, batch_sampler=plan, num_workers=workers))

    def _write_shard(
        self,
        shard: Shard,
        batches: Iterator[tuple[Tensor, Tensor]],
        out: Path,
        data: ImageData,
        bar: Any,
    ) -> None:
        moments, labels = Moments(), []
        labelled = data.num_classes > 0

        def samples() -> Iterator[tuple[str, dict[str, bytes]]]:
            item = shard.first
            while item < shard.last:
                images, targets = next(batches)
                stored = self.encode(images, shard.part, item)
                moments.add(stored, self.stored_content)
                for latent, target in zip(_as_arrays(stored), targets, strict=True):
                    members = {LATENT: _npy(latent if self.options.flips else latent[0])}
                    if labelled:
                        members["cls"] = b"%d" % int(target)
                    if data.context is not None:
                        half = to_half(target, f"of {shard.part} image {item}")
                        members[CONTEXT] = _npy(half.numpy())
                    labels.append(int(target) if labelled else -1)
                    yield f"{shard.part}_{item:09d}", members
                    item += 1
                bar.update(len(images))

        written = write_shard(out / shard.name, samples(), LATENT)
        record = _record(out, shard)
        partial = record.with_suffix(".partial")
        with partial.open("wb") as stream:
            np.savez(
                stream,
                label=np.array(labels, np.int64),
                offset=written.offset,
                size=written.size,
                num_bytes=np.array(written.num_bytes),
                sha256=np.array(written.sha256),
                total=moments.total,
                square=moments.square,
                summed=np.array(moments.count),
            )
        partial.replace(record)

    def encode(self, images: Tensor, part: str, first: int) -> Tensor:
        """Return what is stored of images uint8 [B,C,H,W], items from `first` on: [B,K,C',h,w].

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
                noise = _noise(mean.shape, part, first, number).to(mean)
                mean = mean + (0.5 * logvar).exp() * noise
            copies.append(mean)
        stored = torch.stack(copies, dim=1).to(getattr(torch, self.options.dtype)).cpu()
        self.vae_time += time.perf_counter() - began
        self.images += len(images)
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"latents of the {part} images {first} … {first + len(images) - 1} are not finite "
                f"as {self.options.dtype} in precision={self.precision}; set dtype=float32 and "
                "precision=fp32, or look at these images."
            )
        return stored

    def psnr(self, data: ImageData) -> tuple[float, int]:
        """Return the mean PSNR in dB of decoded latents against their images, and of how many."""
        part = "train" if data.held_out is None else "held_out"
        count = min(PSNR_IMAGES, _count(_part(data, part)))
        size = self.options.batch_size
        shards = [Shard(part, "", 0, count)]
        channels, values = self.vae.latent_channels, []
        for number, (images, _) in enumerate(self._batches(_part(data, part), shards)):
            z = self.encode(images, part, number * size)[:, 0, :channels].float()
            decoded = to_uint8(self.vae.decode(z.to(self.device))).cpu()
            values += psnr(decoded, images).tolist()
        return sum(values) / len(values), count


def psnr(images: Tensor, others: Tensor) -> Tensor:
    """Return 10 log10(255^2 / mean squared difference) in dB, float64 [B], of uint8 [B,C,H,W].

    At most 100 dB, which equal images get.
    """
    gap = (images.double() - others.double()).square().mean(dim=(1, 2, 3))
    return 10 * (255**2 / gap).log10().clamp(max=10.0)


class _Resized(Dataset):
    """Images resized to squares, as `image_folder` does it."""

    def __init__(self, dataset: Dataset, side: int):
        self.dataset, self.side = dataset, side

    def __len__(self) -> int:
        return _count(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        from PIL import Image

        image, label = self.dataset[index]
        pixels = image.permute(1, 2, 0).numpy()
        picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        array = np.array(resize_and_crop(picture, self.side))
        return torch.from_numpy(array).view(self.side, self.side, -1).permute(2, 0, 1), label


def _plan(
    data: ImageData, vae: Vae, options: EncodingOptions, source: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Return all that the bytes of the shards depend on, as plain values.

    Raises:
        ValueError: the data does not fit the autoencoder.
    """
    if not isinstance(data.codec, PixelCodec):
        raise ValueError(f"data={data.name!r} holds latents already; images are encoded.")
    if data.channels not in (1, vae.in_channels):
        raise ValueError(
            f"data={data.name!r} has {data.channels} channels; {vae.name!r} takes "
            f"{vae.in_channels}."
        )
    # Unset, they leave the plan what it was before there were contexts.
    source = {k: v for k, v in source.items() if v is not None or not k.startswith("context")}
    side, content = options.image_size, options.resolved_content(vae)
    size = data.image_size if side is None else (side, side)
    plan = {
        "vae": vae.facts,
        "image_size": size,
        "latent_shape": vae.latent_shape(size),
        "content": "mean_logvar" if content == "moments" else content,
        "dtype": options.dtype,
        "flips": options.flips,
        "num_classes": data.num_classes,
        "class_names": data.class_names,
        "source": source,
        "counts": {part: _count(_part(data, part)) for part in PARTS},
        "shard_size": options.shard_size,
        "batch_size": options.batch_size,
        "precision": precision,
        **({} if data.context is None else {"context": data.context}),
    }
    return json.loads(json.dumps(plan))


def _check_same(out: Path, plan: dict[str, Any]) -> None:
    """Raise `ValueError` if the folder holds latents of another plan, or things of another kind."""
    if (out / PLAN).exists():
        old = json.loads((out / PLAN).read_text())
    elif (out / NAME).exists():
        manifest = read_manifest(out)
        old = json.loads(json.dumps({key: getattr(manifest, key, None) for key in plan}))
        old["counts"] = {part: manifest.count(part) for part in PARTS}
        old = {key: value for key, value in old.items() if value is not None}
    elif any(out.glob("*.tar")):
        raise ValueError(f"out={str(out)!r} holds shards of another kind; choose another folder.")
    else:
        return
    moved = {"vae": {**plan["vae"], "name": ""}}
    old, new = ({**p, "vae": {**p["vae"], "name": ""}} for p in (old, {**plan, **moved}))
    wrong = [
        f"{key}={old[key]!r}, not {value!r}"
        for key, value in new.items()
        if old.get(key, value) != value
    ]
    if wrong:
        raise ValueError(
            f"out={str(out)!r} holds latents that were encoded with {'; '.join(wrong)}. Use the "
            "same settings, or another folder."
        )


def _finish(
    data: ImageData, encoder: _Encoder, out: Path, plan: dict[str, Any], shards: Sequence[Shard]
) -> Manifest:
    """Put the shards' records together into index and manifest, and take them away."""
    records = []
    for shard in shards:
        with np.load(_record(out, shard), allow_pickle=False) as stored:
            records.append({key: stored[key] for key in stored})
    parts: dict[str, list[ShardFacts]] = {part: [] for part in PARTS}
    total = Moments()
    for shard, found in zip(shards, records, strict=True):
        count = shard.last - shard.first
        facts = ShardFacts(shard.name, count, int(found["num_bytes"]), str(found["sha256"]))
        parts[shard.part].append(facts)
        if shard.part == "train":
            total.count += int(found["summed"])
            total.total, total.square = total.total + found["total"], total.square + found["square"]
    mean, std = total.result()
    decibels, num_images = encoder.psnr(data)
    fields = ("vae", "content", "dtype", "flips", "num_classes", "source")
    manifest = Manifest(
        **{key: plan[key] for key in fields},
        image_size=tuple(plan["image_size"]),
        latent_shape=tuple(plan["latent_shape"]),
        class_names=tuple(plan["class_names"]),
        mean=mean,
        std=std,
        psnr_db=decibels,
        psnr_images=num_images,
        parts={part: tuple(found) for part, found in parts.items()},
        context=data.context,
    )
    columns = {
        key: np.concatenate([r[key] for r in records]) for key in ("offset", "size", "label")
    }
    columns["shard"] = np.repeat(np.arange(len(shards)), [len(r["label"]) for r in records])
    save_columns(out / f"index_{LATENT.replace('.', '_')}.npz", manifest.stamp, columns)
    if manifest.context is not None:
        open_index([out / shard.name for shard in shards], (CONTEXT,), manifest.stamp)
    manifest.write(out)
    for file in (out / PLAN, *(_record(out, shard) for shard in shards)):
        file.unlink(missing_ok=True)
    return manifest


def _part(data: ImageData, part: str) -> Dataset:
    """Return a part of the data; an empty list stands for what was not held out."""
    found = data.train if part == "train" else data.held_out
    return [] if found is None else found  # type: ignore[return-value]


def _count(dataset: Dataset) -> int:
    return len(dataset)  # type: ignore[arg-type]


def _record(out: Path, shard: Shard) -> Path:
    return out / f".{shard.name}.npz"


def _is_done(out: Path, shard: Shard) -> bool:
    """Whether a shard and its record are there; the record comes last."""
    file = out / shard.name
    if not (file.exists() and _record(out, shard).exists()):
        return False
    with np.load(_record(out, shard), allow_pickle=False) as stored:
        return file.stat().st_size == int(stored["num_bytes"])


def _noise(shape: Sequence[int], part: str, first: int, copy: int) -> Tensor:
    """Return noise [B,C,h,w] of items from `first` on: a function of the item and its copy."""
    return torch.stack([
        torch.randn(*shape[1:], generator=make_generator(f"encode {part}", first + i, copy))
        for i in range(shape[0])
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


def _write_json(file: Path, content: dict[str, Any]) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2))
    partial.replace(file)
