"""Encode images into a table of latents or images, which `latents.py` reads.

A row may also have a context (embeddings of the image's caption) and features of the image. The
files of the table are shared out among the processes, and each is written atomically. Existing
files are kept, so that the same command continues a stopped encoding. No process waits for another.
When a process is done and all files exist, it writes the statistics to table.json.

Dimensions: B batch, K copies (2: the image and its mirror image), C channels of a latent (C' as
stored: 2 C for moments, the mean and the log-variance), h height, w width, S channels of features.
"""

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tread_zoo.checkpoint_config import EncodingConfig
from tread_zoo.data.arrow import read_rows
from tread_zoo.data.contexts import as_half
from tread_zoo.data.dataset import ImageData, as_bytes, to_model_range, to_uint8
from tread_zoo.data.files import atomic_file, write_text
from tread_zoo.data.labels import check_labels
from tread_zoo.data.latents import SPLITS, split_moments
from tread_zoo.data.loader import CorruptItem, CorruptLog, read_item, read_items
from tread_zoo.data.text import TextEncoder, caption_shape
from tread_zoo.data.vae import Vae
from tread_zoo.progress import progress
from tread_zoo.runtime import autocast
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

PSNR_IMAGES = 16
# latent [B,K,C',h,w] or image [B,1,C,H,W], label [B], perhaps context [B,T,S], features [B,K,S,h,w]
Columns = dict[str, Tensor]
Extract = Callable[[Tensor], Tensor]  # images uint8 [B,C,H,W] -> features float32 [B,S,h,w]


def encode(
    data: ImageData,
    vae: Vae | None,
    out: Path,
    config: EncodingConfig,
    *,
    text: TextEncoder | None = None,
    features: tuple[str, Extract] | None = None,
    precision: str = "fp32",
    rank: int = 0,
    num_ranks: int = 1,
) -> bool:
    """Encode the images that fall to this process, and return whether the table is now finished.

    Args:
        data: the images.
        vae: an autoencoder on its device; None stores the images themselves.
        out, config: folder of the table, and settings of the encoding.
        text: a text encoder for the captions, on its device; None stores the labels or contexts
            that `data` has.
        features: a label and a function from images to features; None stores no features.
        precision: fp32, bf16 or fp16, in which the autoencoder and the text encoder compute.
        rank, num_ranks: number of this process, and how many there are.

    Raises:
        ValueError: `out` has a table with other settings, latents or features are not finite, or
            too many images cannot be read.
    """
    content = "pixels" if vae is None else _choose_content(config.content, vae)
    context = (
        data.context
        if text is None
        else caption_shape(data, text, config.text_length, shown=rank == 0)
    )
    lengths = {part: len(data.parts.get(part, ())) for part in SPLITS}
    size = config.part_size
    spans = {
        f"{part}-{start // size:05d}.arrow": (part, range(start, min(start + size, length)))
        for part, length in lengths.items()
        for start in range(0, length, size)
    }
    metadata: dict[str, Any] = {
        "settings": {"content": content, "part_size": size, "precision": precision,
                     "images": lengths, "source": config.data, "flips": config.flips},
        "content": {"moments": "mean_logvar", "pixels": "pixels"}.get(content, "samples"),
        "dtype": config.dtype if vae else "uint8",
        "num_classes": data.num_classes,
        "class_names": list(data.class_names),
        "context": list(context) if context else None,
        "text_encoder": text and {"name": text.name, **text.metadata},
        "vae": vae and vae.metadata,
        "features": features and features[0],
        "parts": {part: [name for name in spans if spans[name][0] == part] for part in SPLITS},
    }  # fmt: skip
    _begin(out, metadata)
    missing = [name for name in list(spans)[rank::num_ranks] if not (out / name).exists()]
    corrupt, share = out / "corrupt.txt", config.max_corrupt_share
    log = CorruptLog(corrupt, data.parts.values(), share, "max_corrupt_share")
    if rank == 0 and missing and vae is not None:
        logger.info("%-9s PSNR of decoded latents %.1f dB", "vae", _psnr(data, vae))
    encode_text = None
    if text is not None and context is not None:
        encode_text = functools.partial(text.encode, length=context[0], precision=precision)
    extract = features and features[1]
    encoder = _Encoder(data, vae, encode_text, extract, content, precision, config, log)
    total = sum(len(spans[name][1]) for name in missing)
    with progress("encoding", total=total, unit=" images", shown=rank == 0) as bar:
        for name in missing:
            write_part(out / name, encoder.batches(*spans[name], bar), metadata["content"])
    return finish(out, metadata)


def _choose_content(content: str, vae: Vae) -> str:
    if content == "auto":
        content = "moments" if vae.has_posterior else "mode"
    if content != "mode" and not vae.has_posterior:
        raise ValueError(
            f"content={content}, but {vae.kind} gives no distribution: set content=mode."
        )
    return content


def _begin(out: Path, metadata: dict[str, Any]) -> None:
    """Write a table's `metadata` to table.json in the folder `out`, unless the file exists. Raises
    ValueError if the file has other settings than `metadata`."""
    file = out / "table.json"
    out.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_text(file, json.dumps(metadata, indent=1), alone=False)
    existing = json.loads(file.read_text(encoding="utf-8"))
    changed = [k for k, v in json.loads(json.dumps(metadata)).items() if existing.get(k) != v]
    if changed:
        raise ValueError(
            f"out={str(out)!r} has a table that differs in {', '.join(changed)}: name another "
            "folder."
        )


def _read_each(dataset: Any, with_caption: bool, indices: Sequence[int]) -> list[tuple[int, Any]]:
    """Return (index, item) for each index; the item is a `CorruptItem` if it cannot be read. If
    `with_caption` is set, an item ends with its caption, as third element."""
    rows = []
    for index in indices:
        item = read_item(dataset, index)
        if with_caption and not isinstance(item, CorruptItem):
            try:
                item = (*item, dataset.caption(index))
            except ValueError as error:
                item = CorruptItem(index, dataset.item_name(index), str(error))
        rows.append((index, item))
    return rows


@dataclasses.dataclass(frozen=True)
class _Encoder:
    """Computes the columns of a table from images, labels and captions.

    Args:
        data, vae, precision, config: see `encode`.
        encode_text: function from captions to contexts [B,T,S]; None stores what `data` has.
        extract: function from images to features; None stores no features.
        content: what is stored: "moments", "samples", "mode" or "pixels"; see `EncodingConfig`.
        corrupt: the list of images that cannot be read.
    """

    data: ImageData
    vae: Vae | None
    encode_text: Callable[[Sequence[str]], Tensor] | None
    extract: Extract | None
    content: str
    precision: str
    config: EncodingConfig
    corrupt: CorruptLog

    def batches(self, part: str, span: range, bar: Any) -> Iterator[Columns]:
        """Yield, batch by batch, the table's columns for the images with the indices `span` in
        `part` ("train" or "held_out"). Images that cannot be read are left out and listed in
        `corrupt`; the progress bar `bar` counts them, too."""
        loader: Any = DataLoader(
            span,  # type: ignore[arg-type]
            batch_size=self.config.batch_size,
            num_workers=self.config.num_workers,
            collate_fn=functools.partial(
                _read_each, self.data.parts[part], self.encode_text is not None
            ),
        )
        offset = 0 if part == "train" else len(self.data.train)  # type: ignore[arg-type]
        for batch in loader:
            whole = [(i, item) for i, item in batch if not isinstance(item, CorruptItem)]
            for index, item in batch:
                if isinstance(item, CorruptItem):
                    self.corrupt(dataclasses.replace(item, index=offset + index))
            if whole:
                indices, items = zip(*whole, strict=True)
                images, conditions, *captions = zip(*items, strict=True)
                columns = self._columns(part, indices, torch.stack(images))
                if self.encode_text is not None:
                    columns["context"] = as_half(self.encode_text(captions[0]))
                elif self.data.context:
                    columns["context"] = as_half(torch.stack(conditions))
                labelled = not self.data.context
                columns["label"] = torch.tensor(conditions if labelled else [0] * len(whole))
                yield columns
            bar.update(len(batch))

    def _columns(self, part: str, indices: Sequence[int], images: Tensor) -> Columns:
        """Return columns for `images`, uint8 [B,C,H,W]: `latent` or, without an autoencoder,
        `image`; with an extractor, also `features`. The noise of sampled latents depends on `part`
        ("train" or "held_out") and on `indices`, the numbers of the images in this part."""
        copies = (images, images.flip(-1)) if self.config.flips else (images,)
        columns = {"image": images[:, None]}
        if self.vae is not None:
            latents = []
            for number, one in enumerate(copies):
                generators = (make_generator(f"encode {part}", i, number) for i in indices)
                latents.append(self._encode(self.vae, one, generators))
            dtype = getattr(torch, self.config.dtype)
            columns = {"latent": torch.stack(latents, dim=1).to(dtype).cpu()}
        if self.extract is not None:
            maps = [self.extract(one) for one in copies]
            columns["features"] = torch.stack(maps, dim=1).half().cpu()
        return columns

    def _encode(self, vae: Vae, images: Tensor, generators: Iterable[torch.Generator]) -> Tensor:
        """Return the latents of `images` to store: means or samples [B,C,h,w], or moments
        [B,2C,h,w], the mean and the log-variance. For samples, `generators`, one per image, draw
        the noise."""
        device = next(vae.network.parameters()).device
        with autocast(device, self.precision):
            mean, logvar = vae.encode(to_model_range(images.to(device)))
        if logvar is None or self.content == "mode":
            return mean
        if self.content == "moments":
            return torch.cat([mean, logvar], dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=key) for key in generators])
        return mean + (0.5 * logvar).exp() * noise.to(mean)


def _psnr(data: ImageData, vae: Vae) -> float:
    """Return the mean PSNR in dB, 10 log10(255² / mean squared error), of a few training images
    after encoding and decoding by `vae`. It is low with a wrong autoencoder."""
    count = min(PSNR_IMAGES, len(data.train))  # type: ignore[arg-type]
    images = read_items(data.train, range(count))[0]
    mean, _ = vae.encode(to_model_range(images.to(next(vae.network.parameters()).device)))
    error = (to_uint8(vae.decode(mean)).cpu().double() - images).square().mean(dim=(1, 2, 3))
    return float((10 * (255**2 / error.clamp(min=1e-6)).log10()).mean())


# Tables -------------------------------------------------------------------------------------------


def write_table(
    out: Path,
    batches: Iterable[tuple[Tensor, Any]],
    *,
    content: str,
    vae: dict[str, Any] | None = None,
    class_names: Sequence[str] = (),
) -> None:
    """Write latents of another project as a table without a held-out part.

    Args:
        out: the table's folder.
        batches: for each file of the table, latents [B,K,C',h,w] and labels [B] (-1: unlabelled).
            Files of a few thousand latents download quickly. K is 2 with mirrored images, else 1.
        content: what a latent holds: "samples" (C' = C); "mean_logvar" (the mean, then the
            log-variance) or "mean_std" (the mean, then the standard deviation), both C' = 2 C.
        vae: `metadata` of the autoencoder that made them; None if unknown.
        class_names: a name for each label; () names the classes by number.

    Raises:
        ValueError: there are no latents, their shapes differ, they are not finite, standard
            deviations are negative, or labels are not 0 … the number of classes - 1.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.json").unlink(missing_ok=True)
    names, labels, dtype = list[str](), list[Tensor](), ""
    for latents, own in batches:
        names.append(f"train-{len(names):05d}.arrow")
        labels.append(torch.as_tensor(own))
        write_part(out / names[-1], [{"latent": latents, "label": labels[-1]}], content)
        dtype = str(latents.dtype).removeprefix("torch.")
    if not names:
        raise ValueError(f"out={str(out)!r}: there are no latents to write.")
    if not (torch.cat(labels) == -1).all():
        class_names = check_labels(torch.cat(labels), None, class_names, f"out={str(out)!r}")
    metadata = {
        "content": content,
        "dtype": dtype,
        "num_classes": len(class_names),
        "class_names": list(class_names),
        "context": None,
        "vae": vae,
        "features": None,
        "parts": {"train": names, "held_out": []},
    }
    finish(out, metadata)


def write_part(file: Path, batches: Iterable[Columns], content: str) -> None:
    """Write one Arrow file of a table atomically. Its header has sums from which `finish` computes
    the statistics of the table.

    Args:
        file: the file.
        batches: the columns, batch by batch; each tensor is stored in its own dtype.
        content: "pixels" if the rows have images; for latents see `write_table`.

    Raises:
        ValueError: values are not finite, or standard deviations are negative.
    """
    import pyarrow as pa

    main = "image" if content == "pixels" else "latent"
    count, total, square = 0, np.zeros(1), np.zeros(1)  # by channel, in float64
    cells: dict[str, list[Any]] = {main: [], "label": []}  # also if there are no images
    shapes: dict[str, list[int]] = {}
    for batch in batches:
        for name, values in batch.items():
            if not values.isfinite().all():
                raise ValueError(
                    f"{file}: a {name} is not finite as {values.dtype}: check the images; latents "
                    "of tread-zoo encode may need dtype=float32 and precision=fp32."
                )
            as_cells = values.tolist() if name == "label" else map(as_bytes, values)
            cells.setdefault(name, []).extend(as_cells)
            shapes[name] = list(values.shape[1:])
        mean, std = split_moments(batch[main], content)
        if std is not None and (std < 0).any():
            raise ValueError(f"{file}: deviations are negative: content is not {content}.")
        mean, variance = mean.double(), 0.0 if std is None else std.double().square()
        count += mean.numel() // mean.shape[2]
        total = total + mean.sum((0, 1, 3, 4)).numpy()
        square = square + (mean.square() + variance).sum((0, 1, 3, 4)).numpy()
    arrays = {
        name: pa.array(values, pa.int64() if name == "label" else pa.large_binary())
        for name, values in cells.items()
    }
    sums = {"shape": shapes.get(main), "features_shape": shapes.get("features"),
            "count": count, "total": total.tolist(), "square": square.tolist()}  # fmt: skip
    table = pa.table(arrays).replace_schema_metadata({"tread_zoo": json.dumps(sums)})
    with atomic_file(file) as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)


def finish(out: Path, metadata: dict[str, Any]) -> bool:
    """Return whether all files of the table in `out` exist; if so, complete the table.

    table.json gets `metadata`, the shape of a row's latents or images, the number of rows of each
    file, and mean and standard deviation of the training part's latents z by channel. If moments
    are stored, E[z] = E[mean] and E[z^2] = E[mean^2] + E[std^2]. The labels of all rows are written
    to labels.npy.
    """
    import pyarrow

    names = [name for part in SPLITS for name in metadata["parts"][part]]
    if not all((out / name).exists() for name in names):
        return False
    count, total, square, shapes = 0, np.zeros(1), np.zeros(1), {"shape": None}
    for name in metadata["parts"]["train"]:
        with pyarrow.ipc.open_stream(out / name) as reader:
            sums = json.loads(reader.schema.metadata[b"tread_zoo"])
        count += sums["count"]
        total, square = total + np.array(sums["total"]), square + np.array(sums["square"])
        if sums["shape"] and shapes["shape"] not in (None, sums["shape"]):
            raise ValueError(
                f"out={str(out)!r}: {name} has the shape {sums['shape']}, parts before it "
                f"{shapes['shape']}: the images have changed; name another folder."
            )
        if sums["shape"]:
            shapes = {key: sums[key] for key in ("shape", "features_shape")}
    mean = total / count
    std = np.sqrt(np.maximum(square / count - mean**2, 0))
    labels = {name: read_rows(out / name).column("label").to_numpy() for name in names}
    with atomic_file(out / "labels.npy", alone=False) as stream:
        np.save(stream, np.concatenate(list(labels.values())))
    done = {**metadata, **shapes, "mean": mean.tolist(), "std": std.tolist(),
            "lengths": {name: len(column) for name, column in labels.items()}}  # fmt: skip
    write_text(out / "table.json", json.dumps(done, indent=1), alone=False)
    return True
