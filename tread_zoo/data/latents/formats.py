"""Latents in the files that people have: one function a format, all of which return `Stored`.

`shards`, this project's: `manifest.json` and tar shards (`manifest.py`), with contexts if there are
any.

`npz`: one file with `moments` (mean and logvar) or `latents`, both [N,C',h,w], and if there are any
`latents_flip` and `labels` [N].

`lmdb`, MaskDiT's: `data.mdb` (`from_lmdb.py`).

`npy_folder`, after REPA and EDM2: `**/*.npy`, each [C',h,w], and `dataset.json`, `{"labels":
[["00000/img-mean-std-00000000.npy", 3], …]}`; without it, a sub-folder a class, if there are
several and they are no chunks (00000, 00001, …).

`safetensors`, after LightningDiT: `latents_rank*_shard*.safetensors` with `latents` [n,C,h,w],
`latents_flip` and `labels` [n], and `latents_stats.pt` with `mean` and `std`.

No pickle is read: arrays of objects are refused, and .pt files are loaded as weights alone.

Dimensions: N samples, K copies (as it is, mirrored), C' channels as stored, h height, w width.
"""

import io
import json
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from tread_zoo.data.contexts import Contexts
from tread_zoo.data.latents.manifest import (
    CONTEXT,
    LATENT,
    NAME,
    Manifest,
    check_shards,
    read_manifest,
)
from tread_zoo.data.shards import ShardReader, most_open, open_index

logger = logging.getLogger(__name__)

_FLOATS = (np.float16, np.float32)
_TENSOR_FLOATS = ("F16", "BF16", "F32")  # as safetensors calls them
_LIGHTNING = "latents_rank*_shard*.safetensors"


class Items(Protocol):
    """Stored latents by number; can be pickled.

    One may have `item_name(item)`, where that lies, and `lost`, the numbers, int64, of those that
    are known to be lost.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Tensor:
        """Return one, [K,C',h,w]. Raises ValueError naming where it lies if it cannot be read."""


@dataclass(frozen=True)
class Stored:
    """What a format gives: the items, and what it knows of them.

    `labels` is int64 [N], -1 where there is none. `content`, `mean` and `std` [C] are None where
    the files do not tell, `manifest` and `contexts` where there are none. `unlabelled` says why
    what looks like labels is not taken for them.
    """

    items: Items
    labels: np.ndarray
    content: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    manifest: Manifest | None = None
    contexts: Contexts | None = None
    unlabelled: str | None = None


def guess_format(path: Path) -> str:
    """Return the format of what lies at `path`.

    Raises:
        ValueError: nothing does, or nothing that is known.
    """
    if path.is_dir():
        for name, pattern in (
            ("shards", NAME), ("lmdb", "data.mdb"), ("lmdb", "train/data.mdb"),
            ("safetensors", _LIGHTNING), ("npy_folder", "**/*.npy"), ("shards", "train-*.tar"),
        ):  # fmt: skip
            if next(path.glob(pattern), None) is not None:
                return name
    elif path.suffix == ".npz" and path.is_file():
        return "npz"
    what = "holds none of them" if path.exists() else "does not exist"
    raise ValueError(
        f"data.path={str(path)!r} {what}: a folder of scripts/encode_latents.py, an .npz of "
        f"moments or latents, a folder of .npy files, of data.mdb or of {_LIGHTNING} is wanted."
    )


def read_shards(path: Path, verify: str) -> Stored:
    """Return what `scripts/encode_latents.py` wrote; the training part comes first."""
    manifest = read_manifest(path)
    paths = [path / shard.name for shard in manifest.shards]
    counts = [shard.count for shard in manifest.shards]
    damage = check_shards(path, manifest, verify)
    index = open_index(paths, (LATENT,), manifest.stamp, counts=counts, damage=damage)
    index.warn()
    if len(index) != sum(counts):
        raise ValueError(f"{str(path / NAME)!r} and its shards differ in count. Encode again.")
    channels, height, width = manifest.latent_shape
    stored = (channels * (2 if manifest.content == "mean_logvar" else 1), height, width)
    items = _TarItems(
        ShardReader(index), (2, *stored) if manifest.flips else stored, manifest.dtype
    )
    content = "samples" if manifest.content == "mode" else manifest.content
    contexts = None
    if manifest.context is not None:
        of_contexts = open_index(paths, (CONTEXT,), manifest.stamp, counts=counts, damage=damage)
        contexts = _TarMembers(ShardReader(of_contexts), manifest.context, "float16", "context")
    return Stored(items, index.label, content, manifest.mean, manifest.std, manifest, contexts)


class _TarMembers:
    """.npy members of shards, all of one shape and kind, whose header is compared, not parsed."""

    def __init__(self, reader: ShardReader, shape: tuple[int, ...], dtype: str, what: str):
        self.reader, self.shape, self.dtype, self.what = reader, shape, dtype, what
        stream = io.BytesIO()
        np.save(stream, np.zeros(shape, numpy_dtype(dtype)))
        size = int(np.prod(shape)) * numpy_dtype(dtype).itemsize
        self.header, self.num_bytes = stream.getvalue()[:-size], len(stream.getvalue())

    def __len__(self) -> int:
        return len(self.reader)

    @property
    def lost(self) -> np.ndarray:
        """The numbers of those that damaged shards lack."""
        return np.flatnonzero(self.reader.index.size < 0)

    def item_name(self, item: int) -> str:
        """Return the shard and the place there."""
        return self.reader.where(item)

    def __getitem__(self, item: int) -> Tensor:
        content = bytearray(self.reader.read(item))
        if len(content) != self.num_bytes or not content.startswith(self.header):
            raise ValueError(
                f"{self.reader.where(item)} holds no {self.dtype} {self.what} "
                f"{list(self.shape)}: the shard is damaged. Copy it again."
            )
        dtype = getattr(torch, self.dtype)
        return torch.frombuffer(content, dtype=dtype, offset=len(self.header)).view(self.shape)


class _TarItems(_TarMembers):
    """Latents [C',h,w] or, with mirrored copies, [2,C',h,w]."""

    def __init__(self, reader: ShardReader, shape: tuple[int, ...], dtype: str):
        super().__init__(reader, shape, dtype, "latent")

    def __getitem__(self, item: int) -> Tensor:
        return super().__getitem__(item).view(-1, *self.shape[-3:])


def numpy_dtype(dtype: str) -> np.dtype:
    """Return what a `DTYPES` name is stored as: bfloat16, which NumPy lacks, as its bits."""
    return np.dtype({"float16": "<f2", "bfloat16": "<u2", "float32": "<f4"}[dtype])


def read_npz(path: Path) -> Stored:
    """Return `moments` (mean and logvar) or `latents`, `latents_flip` and `labels` of one file."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {key: archive[key] for key in archive.files}
    except Exception as error:  # what NumPy, zip and zlib raise
        raise ValueError(
            f"data.path={str(path)!r} cannot be read as an .npz file of plain arrays ({error}). It "
            "may be cut short or damaged: copy it again."
        ) from error
    keys = [key for key in ("moments", "latents") if key in found]
    if len(keys) != 1:
        raise ValueError(
            f"data.path={str(path)!r} must have one of the arrays 'moments' and 'latents'; it has "
            f"{', '.join(sorted(found)) or 'nothing'}."
        )
    arrays = [found[key] for key in (keys[0], "latents_flip") if key in found]
    for array in arrays:
        if array.ndim != 4 or array.shape != arrays[0].shape or array.dtype not in _FLOATS:
            raise ValueError(
                f"data.path={str(path)!r}: an array has shape {array.shape} and dtype "
                f"{array.dtype}; latents must be float16 or float32 [N,C,h,w], all alike."
            )
    labels = _labels(found.get("labels"), len(arrays[0]), path)
    content = "mean_logvar" if keys == ["moments"] else "samples"
    return Stored(_ArrayItems([torch.from_numpy(a) for a in arrays]), labels, content)


class _ArrayItems:
    """Arrays [N,C',h,w] in memory, one a copy."""

    def __init__(self, copies: Sequence[Tensor]):
        self.copies = copies

    def __len__(self) -> int:
        return len(self.copies[0])

    def __getitem__(self, item: int) -> Tensor:
        return torch.stack([copy[item] for copy in self.copies])


def read_npy_folder(path: Path) -> Stored:
    """Return the .npy files of a folder, in the order of their names.

    Files named `img-mean-std-…` hold mean and deviation, as EDM2 writes them. Labels come from
    `dataset.json`, else from sub-folders with more than one of which each is a class. Folders named
    by digits of one width, or with files `img-mean-std-…`, are chunks of a set and no classes.
    """
    files = _some(path, [p for p in path.rglob("*.npy") if not p.name.startswith(".")])
    labels, chunks = np.full(len(files), -1, np.int64), None
    described = files[0].name.startswith("img-mean-std-")
    table = path / "dataset.json"
    if table.exists():
        try:
            given = dict(json.loads(table.read_text())["labels"] or [])
            names = [file.relative_to(path).as_posix() for file in files]
            missing = [name for name in names if name not in given] if given else []
            if missing:
                raise ValueError(f"it has no label of {missing[0]!r} and {len(missing) - 1} others")
            if given:
                labels = _labels(np.array([given[name] for name in names]), len(files), table)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(table)!r} cannot be used ({error}).") from error
    else:
        folders = sorted({file.relative_to(path).parts[0] for file in files if file.parent != path})
        loose = [file for file in files if file.parent == path]
        if folders and loose:
            raise ValueError(
                f"data.path={str(path)!r} has {loose[0].name!r} beside sub-folders, and no "
                "dataset.json; sort all files into sub-folders, one a class, or none."
            )
        alike = len({len(name) for name in folders}) == 1 and all(n.isdigit() for n in folders)
        if folders and (described or alike):
            chunks = (
                f"data.path={str(path)!r} has no dataset.json, and its folders ({folders[0]!r}, …) "
                "look like chunks of a set as EDM2 and REPA write them, not like classes. Put "
                "dataset.json there, which has the labels, or set data.num_classes=0 to train "
                "without. If they are classes, write one, or add a letter to their names."
            )
        elif len(folders) > 1:
            places = {name: number for number, name in enumerate(folders)}
            labels = np.array([places[f.relative_to(path).parts[0]] for f in files])
    content = "mean_std" if described else None
    return Stored(_FileItems(files), labels, content, unlabelled=chunks)


class _FileItems:
    """One .npy file a latent, [C',h,w] or [1,C',h,w]."""

    def __init__(self, files: Sequence[Path]):
        self.files = [str(file) for file in files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, item: int) -> Tensor:
        file = self.files[item]
        try:
            array = np.asarray(np.load(file, allow_pickle=False))
        except Exception as error:  # of the disk, the header, its numbers
            raise ValueError(f"the latent {file!r} cannot be read ({error}).") from error
        if array.ndim == 4 and len(array) == 1:
            array = array[0]
        if array.ndim != 3 or array.dtype not in _FLOATS:
            raise ValueError(
                f"the latent {file!r} has shape {array.shape} and dtype {array.dtype}; it must be "
                "float16 or float32 [C,h,w]."
            )
        return torch.from_numpy(array)[None]

    def item_name(self, item: int) -> str:
        """Return the file."""
        return self.files[item]


def read_safetensors(path: Path) -> Stored:
    """Return LightningDiT's shards, by name and row; mean and deviation from `latents_stats.pt`.

    A shard that cannot be opened is lost as a whole: as many latents as its header says, or, where
    that is damaged, as the other shards have.
    """
    from safetensors import SafetensorError

    files = _some(path, path.glob(_LIGHTNING))
    found: dict[int, tuple[np.ndarray, bool]] = {}  # labels, whether there are mirrored copies
    damage: dict[int, str] = {}
    for number, file in enumerate(files):
        try:
            found[number] = _read_columns(file)
        except (OSError, SafetensorError) as error:
            damage[number] = f"cannot be read ({error}). Copy it again."
    if not found:
        raise ValueError(f"the shard {str(files[0])!r} {damage[0]}")
    if len({flips for _, flips in found.values()}) > 1:
        raise ValueError(
            f"data.path={str(path)!r}: some shards have latents_flip, and some do not."
        )
    usual = int(np.median([len(labels) for labels, _ in found.values()]))
    labelled = any((labels >= 0).any() for labels, _ in found.values())
    for number, reason in damage.items():
        count = _rows_by_header(files[number]) or usual
        # A lost latent is never read: any class does for a set that has some.
        found[number] = (np.full(count, 0 if labelled else -1, np.int64), False)
        logger.warning(
            "corrupt   the shard %r %s Its %d latents are lost", str(files[number]), reason, count
        )
    columns = [found[number][0] for number in range(len(files))]
    rows = [np.stack([np.full(len(c), n), np.arange(len(c))], 1) for n, c in enumerate(columns)]
    mean, std = _read_stats(path / "latents_stats.pt")
    flips = any(flips for _, flips in found.values())
    items = _TensorItems(files, np.concatenate(rows), flips, damage)
    return Stored(items, np.concatenate(columns), "samples", mean, std)


def _read_columns(file: Path) -> tuple[np.ndarray, bool]:
    """Return the labels of a shard, int64 [n], and whether it has mirrored copies.

    Raises:
        ValueError: it holds no latents, or of a kind that is none.
        OSError, SafetensorError: it cannot be read.
    """
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        keys = set(opened.keys())
        for key in ("latents", *({"latents_flip"} & keys)):
            if key not in keys:
                raise ValueError(
                    f"the shard {str(file)!r} has no tensor {key!r}; it has {sorted(keys)}."
                )
            shape, dtype = opened.get_slice(key).get_shape(), opened.get_slice(key).get_dtype()
            if len(shape) != 4 or dtype not in _TENSOR_FLOATS:
                raise ValueError(
                    f"the shard {str(file)!r}: {key!r} has shape {shape} and dtype {dtype}; it "
                    "must be float16, bfloat16 or float32 [n,C,h,w]. Whole numbers are the codes "
                    "of a discrete tokenizer, which are no latents."
                )
        count = opened.get_slice("latents").get_shape()[0]
        labels = opened.get_tensor("labels").numpy() if "labels" in keys else None
    return _labels(labels, count, file), "latents_flip" in keys


def _rows_by_header(file: Path) -> int | None:
    """Return how many latents a cut shard had: its start tells, if that is whole."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                return None
            return int(json.loads(stream.read(length))["latents"]["shape"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


class _TensorItems:
    """Rows of safetensors files, opened when first read, in each process anew."""

    def __init__(
        self, files: Sequence[Path], rows: np.ndarray, flips: bool, damage: dict[int, str]
    ):
        self.files, self.rows, self.damage = [str(file) for file in files], rows, damage
        self.names = ("latents", "latents_flip") if flips else ("latents",)
        self._open: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lost(self) -> np.ndarray:
        """The numbers of those in shards that cannot be opened."""
        return np.flatnonzero(np.isin(self.rows[:, 0], list(self.damage)))

    def item_name(self, item: int) -> str:
        """Return the shard and the row there."""
        number, row = self.rows[item]
        return f"{self.files[number]!r}, row {row}"

    def __getitem__(self, item: int) -> Tensor:
        from safetensors import SafetensorError, safe_open

        number, row = (int(value) for value in self.rows[item])
        if number in self.damage:
            raise ValueError(f"the shard {self.files[number]!r} {self.damage[number]}")
        key = (os.getpid(), number)
        try:
            if key not in self._open:
                if len(self._open) >= most_open():
                    self._open.popitem(last=False)
                self._open[key] = safe_open(self.files[number], "pt")
            slices = (self._open[key].get_slice(name) for name in self.names)
            return torch.cat([found[row : row + 1] for found in slices])
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"the shard {self.files[number]!r} cannot be read ({error})."
            ) from error


def _some(path: Path, files: Iterable[Path]) -> list[Path]:
    """Return files by name. Raises ValueError if there is none."""
    found = sorted(files)
    if not found:
        raise ValueError(f"data.path={str(path)!r} holds no latents of this data.format.")
    return found


def _read_stats(
    file: Path,
) -> tuple[tuple[float, ...], tuple[float, ...]] | tuple[None, None]:
    if not file.exists():
        return None, None
    try:
        stats = torch.load(file, map_location="cpu", weights_only=True)
        mean, std = (tuple(stats[key].double().flatten().tolist()) for key in ("mean", "std"))
    except Exception as error:  # torch raises what pickle, zip and its own reader raise
        raise ValueError(
            f"{str(file)!r} cannot be read as tensors 'mean' and 'std' ({type(error).__name__}); "
            "remove it to have them measured."
        ) from error
    return mean, std


def _labels(found: np.ndarray | None, count: int, path: Path) -> np.ndarray:
    """Return int64 [N], -1 where there are no labels."""
    if found is None:
        return np.full(count, -1, np.int64)
    if found.shape != (count,) or found.dtype.kind not in "iu" or (count and found.min() < 0):
        raise ValueError(
            f"{str(path)!r}: labels have shape {found.shape} and dtype {found.dtype} for {count} "
            "latents; there must be one whole number from 0 on a latent."
        )
    return found.astype(np.int64)
