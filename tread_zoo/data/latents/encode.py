"""Encode images into a folder of latents (`manifest.py`), shard by shard, on one or more processes.

Shard s of a part holds its items s * shard_size …; process r of n encodes every n-th of those that
are missing. A shard is written beside and renamed, its record after it (`progress.py`): what is
whole is kept, and the same command again does the rest and gives the same bytes. The main process
then puts the records together into the manifest. Where there is one already, the shards that are
missing or damaged by it are encoded anew.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tread_zoo.data.codec import PixelCodec
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.latents.encoder import (
    Encoder,
    EncodingOptions,
    count_of,
    part_of,
)
from tread_zoo.data.latents.manifest import (
    CONTEXT,
    LATENT,
    NAME,
    PARTS,
    Manifest,
    ShardFacts,
    read_manifest,
)
from tread_zoo.data.latents.progress import (
    PLAN,
    Shard,
    facts_of,
    plan_shards,
    read_plan,
    read_progress,
    read_record,
    record_file,
    shards_of,
    survey,
    write_plan,
)
from tread_zoo.data.latents.source import Moments
from tread_zoo.data.latents.vae import Vae
from tread_zoo.data.shards import open_index, save_columns

logger = logging.getLogger(__name__)


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
        ValueError: data or options that do not fit the autoencoder, the folder holds others, or too
            many images cannot be read.
    """
    plan = _plan(data, vae, options, source, precision)
    out.mkdir(parents=True, exist_ok=True)
    _check_same(out, plan)
    manifest = read_manifest(out) if (out / NAME).exists() else None
    counts = plan["counts"]
    shards = shards_of(manifest) if manifest else plan_shards(counts, options.shard_size)
    wait()  # all have read what is there before it changes
    if rank == 0:
        _begin(data, out, plan, shards, manifest, options.verify)
    wait()
    if not (out / PLAN).exists():
        logger.info("%-9s %s is complete; nothing to do", "done", out)
        return Encoded(manifest, 0, 0.0, 0.0)
    progress = read_progress(out, shards)
    if rank == 0:
        there = len(shards) - len(progress.missing)
        logger.info("%-9s %d of %d shards are there already", "encoding", there, len(shards))
    encoder = Encoder(vae, options, plan["content"], precision, sum(counts.values()))
    encoder.left_out += progress.left_out
    encoder.check_share()
    began = time.perf_counter()
    encoder.write(data, progress.missing, out, rank=rank, num_ranks=num_ranks)
    taken = max(time.perf_counter() - began, 1e-9)
    wait()
    images, share = encoder.images, encoder.vae_time / taken
    if rank != 0:
        return Encoded(None, images, images / taken, share)
    encoder.left_out = []  # those of all processes, from here on
    if manifest is None:
        manifest = _finish(data, encoder, out, plan, shards)
    else:
        manifest = _mend(encoder, out, manifest, shards)
    for file in (out / PLAN, *(record_file(out, shard) for shard in shards)):
        file.unlink(missing_ok=True)
    if encoder.left_out:
        logger.warning(
            "left out  %d images that cannot be read; %s lists them", len(encoder.left_out), NAME
        )
    return Encoded(manifest, images, images / taken, share)


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
        "counts": {part: count_of(part_of(data, part)) for part in PARTS},
        "shard_size": options.shard_size,
        "batch_size": options.batch_size,
        "precision": precision,
        **({} if data.context is None else {"context": data.context}),
    }
    return json.loads(json.dumps(plan))


def _check_same(out: Path, plan: dict[str, Any]) -> None:
    """Raise `ValueError` if the folder holds latents of another plan, or things of another kind."""
    if (out / PLAN).exists():
        old = read_plan(out)
    elif (out / NAME).exists():
        manifest = read_manifest(out)
        old = json.loads(json.dumps({key: getattr(manifest, key, None) for key in plan}))
        old["counts"] = {part: manifest.num_images(part) for part in PARTS}
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


def _begin(
    data: ImageData,
    out: Path,
    plan: dict[str, Any],
    shards: Sequence[Shard],
    manifest: Manifest | None,
    verify: str,
) -> None:
    """Write down which shards are to be encoded; nothing, if the manifest has all there is."""
    if manifest is not None and (out / PLAN).exists():
        verify = "sha256"  # a stop on the way may have left a shard that its length does not tell
    progress = survey(data, out, shards, manifest, verify)
    for shard in progress.missing:
        record_file(out, shard).unlink(missing_ok=True)
    if manifest is None or progress.missing or any(record_file(out, s).exists() for s in shards):
        write_plan(out, plan, progress)
    else:
        (out / PLAN).unlink(missing_ok=True)


def _mend(encoder: Encoder, out: Path, manifest: Manifest, shards: Sequence[Shard]) -> Manifest:
    """Return the manifest with what the records say of shards that were encoded anew.

    It is left as it is where they have the recorded bytes. Mean and deviation stay in any case:
    runs remember them.
    """
    parts: dict[str, list[ShardFacts]] = {part: [] for part in PARTS}
    changed, same = list[str](), 0
    for shard, facts in zip(shards, manifest.shards, strict=True):
        record = read_record(out, shard)
        found = facts if record is None else facts_of(shard, record)
        parts[shard.part].append(found)
        encoder.left_out += found.left_out
        if found != facts:
            changed.append(shard.name)
        elif record is not None:
            same += 1
    encoder.check_share()
    logger.info("%-9s %d shards have the bytes that the manifest has", "again", same)
    if not changed:
        return manifest
    logger.warning(
        "again     %s: other bytes than at first (other images, hardware or libraries); the "
        "manifest now has these, and the mean and deviation of the first time",
        ", ".join(changed),
    )
    manifest = replace(manifest, parts={part: tuple(found) for part, found in parts.items()})
    manifest.write(out)
    return manifest


def _finish(
    data: ImageData, encoder: Encoder, out: Path, plan: dict[str, Any], shards: Sequence[Shard]
) -> Manifest:
    """Put the shards' records together into index and manifest."""
    records = [_needed(out, shard) for shard in shards]
    parts: dict[str, list[ShardFacts]] = {part: [] for part in PARTS}
    total = Moments()
    for shard, found in zip(shards, records, strict=True):
        facts = facts_of(shard, found)
        parts[shard.part].append(facts)
        encoder.left_out += facts.left_out
        if shard.part == "train":
            total.count += int(found["summed"])
            total.total, total.square = total.total + found["total"], total.square + found["square"]
    encoder.check_share()
    if not total.count:
        raise ValueError(f"out={str(out)!r}: no image of the training part can be read.")
    mean, std = total.result()
    decibels, num_images = encoder.psnr(data, parts)
    fields = ["vae", "content", "dtype", "flips", "num_classes", "source"]
    fields += ["precision", "batch_size", "shard_size"]
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
    return manifest


def _needed(out: Path, shard: Shard) -> dict[str, np.ndarray]:
    """Return a shard's record. Raises ValueError if it is not there any more."""
    found = read_record(out, shard)
    if found is None:
        raise ValueError(
            f"the record {str(record_file(out, shard))!r} of a shard that was just encoded cannot "
            "be read; the same command again encodes that shard anew."
        )
    return found
