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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from tread_zoo.config import OPTIONS
from tread_zoo.data.codec import to_model_range, to_uint8
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.files import written_whole
from tread_zoo.data.latents import PARTS, split_moments
from tread_zoo.data.loader import CorruptItem, CorruptLog, read_item
from tread_zoo.data.vae import Vae
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

PSNR_IMAGES = 16


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
    max_corrupt_share: Annotated[float, Field(ge=0, lt=1)] = 0.001
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
    lengths = {part: len(_part_of(data, part)) for part in PARTS}
    files = {
        part: [f"{part}-{n:05d}.arrow" for n in range(-(-lengths[part] // config.part_size))]
        for part in PARTS
    }
    facts: dict[str, Any] = {
        "settings": {"content": content, "part_size": config.part_size, "precision": precision,
                     "images": lengths, "source": config.data},
        "content": "mean_logvar" if content == "moments" else "samples",
        "dtype": config.dtype,
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "context": list(data.context) if data.context else None,
        "vae": vae.facts,
        "parts": files,
    }  # fmt: skip
    _begin(out, facts)
    corrupt = CorruptLog(
        out / "corrupt.txt", num_items=sum(lengths.values()), max_share=config.max_corrupt_share
    )
    encoder = _Encoder(vae, content, config, precision)
    numbered = [(part, n) for part in PARTS for n in range(len(files[part]))]
    missing = [
        (part, n) for part, n in numbered[rank::num_ranks] if not (out / files[part][n]).exists()
    ]
    if rank == 0 and missing:
        logger.info("%-9s PSNR of decoded latents %.1f dB", "vae", encoder.psnr(data))
    spans = [
        range(n * config.part_size, min((n + 1) * config.part_size, lengths[part]))
        for part, n in missing
    ]
    began, terminal = time.perf_counter(), sys.stderr.isatty()
    with tqdm(total=sum(map(len, spans)), unit="image", disable=rank != 0 or not terminal) as bar:
        for number, ((part, n), span) in enumerate(zip(missing, spans, strict=True), start=1):
            offset = 0 if part == "train" else lengths["train"]
            encoder.write_part(out / files[part][n], data, part, span, corrupt, offset, bar.update)
            if rank == 0 and not terminal:
                left = (time.perf_counter() - began) * (len(spans) / number - 1)
                logger.info("encoding  part %d of %d, %d s left", number, len(spans), left)
    return finish(out, facts)


def _begin(out: Path, facts: dict[str, Any]) -> None:
    """Write table.json without statistics, or check that it is of the same encoding."""
    file = out / "table.json"
    out.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        with written_whole(file, alone=False) as stream:
            stream.write(json.dumps(facts, indent=1).encode())
    there = json.loads(file.read_text())
    other = [key for key, value in json.loads(json.dumps(facts)).items() if there[key] != value]
    if other:
        raise ValueError(
            f"out={str(out)!r} has a table that differs in {', '.join(other)}: encode with the "
            "same settings, or into another folder."
        )


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
            own = json.loads(reader.schema.metadata[b"tread_zoo"])
        count += own["count"]
        total, square = total + np.array(own["total"]), square + np.array(own["square"])
        shape = own["shape"] or shape
    mean = total / count
    std = np.sqrt(np.maximum(square / count - mean**2, 0))
    done = {**facts, "shape": shape, "mean": mean.tolist(), "std": std.tolist()}
    with written_whole(out / "table.json", alone=False) as stream:
        stream.write(json.dumps(done, indent=1).encode())
    return True


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
    rest, names, classes, dtype = iter(items), list[str](), set[int](), ""
    while part := list(itertools.islice(rest, part_size)):
        latents, labels = zip(*part, strict=True)
        names.append(f"train-{len(names):05d}.arrow")
        write_part(out / names[-1], latents, labels, content)
        classes |= set(labels)
        dtype = str(latents[0].dtype).removeprefix("torch.")
    facts = {
        "content": content,
        "dtype": dtype,
        "num_classes": 0 if -1 in classes else max(classes) + 1,
        "class_names": [],
        "context": None,
        "vae": vae,
        "parts": {"train": names, "held_out": []},
    }
    finish(out, facts)
    return part_size * (len(names) - 1) + len(latents)


def write_part(
    file: Path,
    latents: Sequence[Tensor],
    labels: Sequence[int],
    content: str,
    contexts: Sequence[Tensor] = (),
) -> None:
    """Write one Arrow file, whole or not at all.

    Args:
        file: its path.
        latents: [K,C',h,w] each, of the dtype that they are stored in.
        labels: one each.
        content: samples, mean_logvar or mean_std, for the statistics.
        contexts: float16 [T,S] each, if there are any.
    """
    import pyarrow as pa

    count, total, square = 0, np.zeros(1), np.zeros(1)  # of each channel, in float64
    for latent in latents:
        mean, std = split_moments(latent, content)
        mean = mean.double()
        squares = mean.square() if std is None else mean.square() + std.double().square()
        count += mean.numel() // mean.shape[1]
        total = total + mean.sum((0, 2, 3)).numpy()
        square = square + squares.sum((0, 2, 3)).numpy()
    columns = {
        "latent": pa.array([as_bytes(latent) for latent in latents], pa.large_binary()),
        "label": pa.array(labels, pa.int64()),
    }
    if contexts:
        columns["context"] = pa.array([as_bytes(one) for one in contexts], pa.large_binary())
    own = {
        "shape": list(latents[0].shape) if latents else None,
        "count": count,
        "total": total.tolist(),
        "square": square.tolist(),
    }
    table = pa.table(columns).replace_schema_metadata({"tread_zoo": json.dumps(own)})
    with written_whole(file) as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def as_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor on the CPU, in C order."""
    return values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


class _Encoder:
    """An autoencoder with what is to be stored."""

    def __init__(self, vae: Vae, content: str, config: EncodingConfig, precision: str):
        self.vae, self.content, self.config, self.precision = vae, content, config, precision
        self.device = next(vae.network.parameters()).device

    def write_part(
        self,
        file: Path,
        data: ImageData,
        part: str,
        span: range,
        corrupt: CorruptLog,
        offset: int,
        done: Callable[[int], Any],
    ) -> None:
        """Encode the images `span` of a part into a file; `offset` is what corrupt.txt counts on,
        `done` is called with the number of images of each batch."""
        latents: list[Tensor] = []
        labels: list[int] = []
        contexts: list[Tensor] = []
        for items in self._read(_part_of(data, part), span):
            whole = []
            done(len(items))
            for index, item in items:
                if isinstance(item, CorruptItem):
                    corrupt(CorruptItem(offset + index, item.name, item.reason))
                else:
                    whole.append((index, *item))
            if not whole:
                continue
            indices, images, conditions = zip(*whole, strict=True)
            latents += self.encode(torch.stack(images), part, indices).unbind()
            labels += [0 if data.context else int(label) for label in conditions]
            contexts += [_to_half(one) for one in conditions] if data.context else []
        stored = "mean_logvar" if self.content == "moments" else "samples"
        write_part(file, latents, labels, stored, contexts)

    def encode(self, images: Tensor, part: str, indices: Sequence[int]) -> Tensor:
        """Return what is stored of images uint8 [B,C,H,W], which are `indices` of a part:
        [B,K,C',h,w].

        Raises:
            ValueError: latents that are not finite, or beyond what the dtype holds.
        """
        x = to_model_range(images.to(self.device))
        copies = []
        for number, one in enumerate((x, x.flip(-1)) if self.config.flips else (x,)):
            with autocast(self.device, self.precision):
                mean, logvar = self.vae.encode(one)
            if self.content == "moments" and logvar is not None:
                mean = torch.cat([mean, logvar], dim=1)
            elif self.content == "samples" and logvar is not None:
                keys = [make_generator(f"encode {part}", index, number) for index in indices]
                noise = torch.stack([torch.randn(mean.shape[1:], generator=key) for key in keys])
                mean = mean + (0.5 * logvar).exp() * noise.to(mean)
            copies.append(mean)
        stored = torch.stack(copies, dim=1).to(getattr(torch, self.config.dtype)).cpu()
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"latents of the {part} images {indices[0]} … {indices[-1]} are not finite as "
                f"{self.config.dtype} in precision={self.precision}; set dtype=float32 and "
                "precision=fp32, or look at these images."
            )
        return stored

    def psnr(self, data: ImageData) -> float:
        """Return the mean PSNR, 10 log10(255² / mean squared difference) in dB, of some images
        that are encoded and decoded: a wrong autoencoder shows here."""
        count = min(PSNR_IMAGES, len(data.train))  # type: ignore[arg-type]
        first = (read_item(data.train, index) for index in range(count))
        images = torch.stack([item[0] for item in first if not isinstance(item, CorruptItem)])
        mean, _ = self.vae.encode(to_model_range(images.to(self.device)))
        gap = to_uint8(self.vae.decode(mean)).cpu().double() - images.double()
        error = gap.square().mean(dim=(1, 2, 3)).clamp(min=1e-6)
        return float((10 * (255**2 / error).log10()).mean())

    def _read(self, dataset: Dataset, span: range) -> Iterable[list[tuple[int, Any]]]:
        """Yield batches of (index, item or what is wrong with it)."""
        return DataLoader(
            _Reader(dataset), sampler=span, batch_size=self.config.batch_size,
            collate_fn=list, num_workers=self.config.num_workers,
        )  # fmt: skip


class _Reader(Dataset):
    """Reads items, or what is wrong with them."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, read_item(self.dataset, index)


def _part_of(data: ImageData, part: str) -> Any:
    """Return a part of the data; an empty list stands for what was not held out."""
    dataset = data.train if part == "train" else data.held_out
    return [] if dataset is None else dataset


def _to_half(context: Tensor) -> Tensor:
    half = context.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(
            f"a context reaches {float(context.abs().max()):g}, beyond what float16 holds (65504): "
            "divide all embeddings by a number first."
        )
    return half
