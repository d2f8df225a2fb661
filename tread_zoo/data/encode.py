"""Encoding images into a table of latents (`latents.py`), part by part.

Part n of the table is written by process n mod the number of processes, whole or not at all; those
that are there are left as they are. Whoever finds all parts there writes the rest of table.json, so
no process waits for another, and a stopped encoding goes on with the same command.

Dimensions: B batch, K copies (2: as it is, mirrored), C channels of a latent (2 C stored where
there are moments), h height, w width.
"""

import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from tread_zoo.config import OPTIONS, Fraction
from tread_zoo.data.dataset import ImageData, to_model_range, to_uint8
from tread_zoo.data.files import written_whole
from tread_zoo.data.latents import PARTS, split_moments
from tread_zoo.data.loader import CorruptItem, CorruptLog, read_item
from tread_zoo.data.vae import Vae
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

PSNR_IMAGES = 16
Item = tuple[Tensor, int] | tuple[Tensor, int, Tensor]  # latent [K,C',h,w], label, context [T,S]


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class EncodingConfig:
    """How to encode.

    Args:
        plugins: as of `RunConfig`.
        data: a source of images.
        vae: a folder of diffusers, or a hub's name.
        out: folder of the table; the same command again encodes what is missing.
        content: moments keeps mean and logvar, and training draws; samples draws once; mode takes
            the mean; auto is moments where the autoencoder has them, else mode.
        flips: encode the mirrored image beside each, for training.horizontal_flip.
        dtype: on the disk.
        batch_size: images at a time.
        part_size: images in a file.
        num_workers: processes that read images.
        max_corrupt_share: fraction of the images that may be unreadable, each left out and listed
            in corrupt.txt; past it the encoding stops.
        device, precision: of the autoencoder.
    """

    plugins: tuple[str, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    vae: str = ""
    out: str = ""
    content: Literal["auto", "moments", "samples", "mode"] = "auto"
    flips: bool = False
    dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    batch_size: PositiveInt = 16
    part_size: PositiveInt = 4000
    num_workers: NonNegativeInt = 0
    max_corrupt_share: Fraction = 0.001
    device: str = "auto"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "fp32"


def encode(
    data: ImageData,
    vae: Vae,
    out: Path,
    config: EncodingConfig,
    *,
    precision: str = "fp32",
    rank: int = 0,
    num_ranks: int = 1,
) -> bool:
    """Encode this process's parts of the data; return whether the table is finished.

    Args:
        data: of images.
        vae: on the device that is to encode.
        out: the table's folder.
        config: how.
        precision: of the autoencoder, resolved.
        rank, num_ranks: of this process.

    Raises:
        ValueError: `out` has a table of other settings, latents are not finite, or too many images
            cannot be read.
    """
    content = config.content
    if content == "auto":
        content = "moments" if vae.has_posterior else "mode"
    if content != "mode" and not vae.has_posterior:
        raise ValueError(
            f"content={content}, but {vae.kind} has no distribution: set content=mode."
        )
    datasets: dict[str, Any] = {part: getattr(data, part) or () for part in PARTS}
    lengths, size = {part: len(dataset) for part, dataset in datasets.items()}, config.part_size
    spans = {
        f"{part}-{start // size:05d}.arrow": (part, range(start, min(start + size, length)))
        for part, length in lengths.items()
        for start in range(0, length, size)
    }
    facts: dict[str, Any] = {
        "settings": {"content": content, "part_size": size, "precision": precision,
                     "images": lengths, "source": config.data},
        "content": "mean_logvar" if content == "moments" else "samples",
        "dtype": config.dtype,
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "context": list(data.context) if data.context else None,
        "vae": vae.facts,
        "parts": {part: [name for name in spans if spans[name][0] == part] for part in PARTS},
    }  # fmt: skip
    _begin(out, facts)
    corrupt = CorruptLog(
        out / "corrupt.txt", num_items=sum(lengths.values()), max_share=config.max_corrupt_share
    )
    missing = [name for name in list(spans)[rank::num_ranks] if not (out / name).exists()]
    if rank == 0 and missing:
        logger.info("%-9s PSNR of decoded latents %.1f dB", "vae", _psnr(data, vae))
    began, terminal = time.time(), sys.stderr.isatty()
    total = sum(len(spans[name][1]) for name in missing)
    with tqdm(total=total, unit="image", disable=rank != 0 or not terminal) as bar:
        for number, name in enumerate(missing, start=1):
            part, span = spans[name]
            offset = 0 if part == "train" else lengths["train"]
            batches = _read(datasets[part], span, config, corrupt, offset, bar.update)
            items = _encode(batches, vae, part, content, config, precision)
            write_part(out / name, items, facts["content"])
            if rank == 0 and not terminal:
                left = (time.time() - began) * (len(missing) / number - 1)
                logger.info("encoding  part %d of %d, %d s left", number, len(missing), left)
    return finish(out, facts)


def _begin(out: Path, facts: dict[str, Any]) -> None:
    """Write table.json without statistics, or check that it is of the same encoding."""
    file = out / "table.json"
    out.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        _write_json(file, facts)
    there = json.loads(file.read_text())
    other = [key for key, value in json.loads(json.dumps(facts)).items() if there[key] != value]
    if other:
        raise ValueError(
            f"out={str(out)!r} has a table that differs in {', '.join(other)}: encode with the "
            "same settings, or into another folder."
        )


def _read(
    dataset: Dataset[Any],
    span: range,
    config: EncodingConfig,
    corrupt: CorruptLog,
    offset: int,
    advance: Callable[[int], object],
) -> Iterator[list[tuple[int, Tensor, Any]]]:
    """Yield batches of (index, image, label or context) of those that can be read; the others are
    logged by index + `offset`."""
    loader = DataLoader(
        _Reader(dataset), sampler=span, batch_size=config.batch_size, collate_fn=list,
        num_workers=config.num_workers,
    )  # fmt: skip
    for items in loader:
        whole = []
        for index, item in items:
            if isinstance(item, CorruptItem):
                corrupt(replace(item, index=offset + index))
            else:
                whole.append((index, *item))
        if whole:
            yield whole
        advance(len(items))


class _Reader(Dataset[Any]):
    """Reads items, or what is wrong with them."""

    def __init__(self, dataset: Dataset[Any]):
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, read_item(self.dataset, index)


def _encode(
    batches: Iterable[list[tuple[int, Tensor, Any]]],
    vae: Vae,
    part: str,
    content: str,
    config: EncodingConfig,
    precision: str,
) -> Iterator[Item]:
    """Yield what is stored of each image.

    Raises:
        ValueError: latents or contexts that are not finite in the dtype.
    """
    device = next(vae.network.parameters()).device
    for batch in batches:
        indices, images, conditions = zip(*batch, strict=True)
        x = to_model_range(torch.stack(images).to(device))
        copies = []
        for number, one in enumerate((x, x.flip(-1)) if config.flips else (x,)):
            with autocast(device, precision):
                mean, logvar = vae.encode(one)
            if content == "moments" and logvar is not None:
                mean = torch.cat([mean, logvar], dim=1)
            elif content == "samples" and logvar is not None:
                keys = [make_generator(f"encode {part}", index, number) for index in indices]
                noise = torch.stack([torch.randn(mean.shape[1:], generator=key) for key in keys])
                mean = mean + (0.5 * logvar).exp() * noise.to(mean)
            copies.append(mean)
        latents = torch.stack(copies, dim=1).to(getattr(torch, config.dtype)).cpu()
        if not torch.isfinite(latents).all():
            raise ValueError(
                f"latents of the {part} images {indices[0]} … {indices[-1]} are not finite as "
                f"{config.dtype} in precision={precision}; set dtype=float32 and precision=fp32, "
                "or look at these images."
            )
        for latent, condition in zip(latents, conditions, strict=True):
            if not isinstance(condition, Tensor):
                yield latent, int(condition)
                continue
            if not condition.half().isfinite().all():
                raise ValueError(
                    f"a context reaches {float(condition.abs().max()):g}, beyond what float16 "
                    "holds (65504): divide all embeddings by a number first."
                )
            yield latent, 0, condition.half()


def _psnr(data: ImageData, vae: Vae) -> float:
    """Return the mean PSNR, 10 log10(255² / mean squared difference) in dB, of some images that are
    encoded and decoded: a wrong autoencoder shows here."""
    count = min(PSNR_IMAGES, len(data.train))  # type: ignore[arg-type]
    first = (read_item(data.train, index) for index in range(count))
    images = torch.stack([item[0] for item in first if not isinstance(item, CorruptItem)])
    mean, _ = vae.encode(to_model_range(images.to(next(vae.network.parameters()).device)))
    error = (to_uint8(vae.decode(mean)).cpu().double() - images).square().mean(dim=(1, 2, 3))
    return float((10 * (255**2 / error.clamp(min=1e-6)).log10()).mean())


# Tables -------------------------------------------------------------------------------------------


def write_table(
    out: Path,
    items: Iterable[tuple[Tensor, int]],
    *,
    content: str,
    vae: dict[str, Any] | None = None,
    part_size: int = 4000,
) -> int:
    """Write latents from anywhere as a table without a held-out part; return how many they are.

    Args:
        out: the table's folder.
        items: latents [K,C',h,w], all alike, and labels, -1 where there are none.
        content: samples, mean_logvar or mean_std.
        vae: `facts` of the autoencoder that made them, if it is known.
        part_size: latents in a file.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.json").unlink(missing_ok=True)
    rest, names, labels, count, dtype = iter(items), list[str](), set[int](), 0, ""
    while part := list(itertools.islice(rest, part_size)):
        names.append(f"train-{len(names):05d}.arrow")
        write_part(out / names[-1], part, content)
        labels |= {label for _, label in part}
        count, dtype = count + len(part), str(part[0][0].dtype).removeprefix("torch.")
    facts = {
        "content": content,
        "dtype": dtype,
        "num_classes": 0 if -1 in labels else max(labels) + 1,
        "class_names": [],
        "context": None,
        "vae": vae,
        "parts": {"train": names, "held_out": []},
    }
    finish(out, facts)
    return count


def write_part(file: Path, items: Iterable[Item], content: str) -> None:
    """Write one Arrow file, whole or not at all, with sums for the statistics.

    Args:
        file: its path.
        items: latents in the dtype that they are stored in, labels, and perhaps contexts, float16.
        content: samples, mean_logvar or mean_std.
    """
    import pyarrow as pa

    count, total, square, shape = 0, np.zeros(1), np.zeros(1), None  # by channel, in float64
    columns: dict[str, list[Any]] = {"latent": [], "label": []}
    for latent, label, *context in items:
        columns["latent"].append(as_bytes(latent))
        columns["label"].append(label)
        if context:
            columns.setdefault("context", []).append(as_bytes(context[0]))
        mean, std = split_moments(latent, content)
        mean, variance = mean.double(), 0.0 if std is None else std.double().square()
        count, shape = count + mean.numel() // mean.shape[1], list(latent.shape)
        total = total + mean.sum((0, 2, 3)).numpy()
        square = square + (mean.square() + variance).sum((0, 2, 3)).numpy()
    arrays = {
        name: pa.array(values, pa.int64() if name == "label" else pa.large_binary())
        for name, values in columns.items()
    }
    sums = {"shape": shape, "count": count, "total": total.tolist(), "square": square.tolist()}
    table = pa.table(arrays).replace_schema_metadata({"tread_zoo": json.dumps(sums)})
    with written_whole(file) as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def as_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU, in C order."""
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def finish(out: Path, facts: dict[str, Any]) -> bool:
    """Write table.json with shape, mean and standard deviation by channel, if all parts are there;
    of moments, over what they draw: E[z] = E[mean], E[z^2] = E[mean^2] + E[std^2]."""
    import pyarrow

    names = [name for part in PARTS for name in facts["parts"][part]]
    if not all((out / name).exists() for name in names):
        return False
    count, total, square, shape = 0, np.zeros(1), np.zeros(1), None
    for name in facts["parts"]["train"]:
        with pyarrow.ipc.open_stream(out / name) as reader:
            sums = json.loads(reader.schema.metadata[b"tread_zoo"])
        count += sums["count"]
        total, square = total + np.array(sums["total"]), square + np.array(sums["square"])
        shape = sums["shape"] or shape
    mean = total / count
    std = np.sqrt(np.maximum(square / count - mean**2, 0))
    done = {**facts, "shape": shape, "mean": mean.tolist(), "std": std.tolist()}
    _write_json(out / "table.json", done)
    return True


def _write_json(file: Path, values: dict[str, Any]) -> None:
    with written_whole(file, alone=False) as stream:
        stream.write(json.dumps(values, indent=1).encode())
