"""Contexts: what an image is made for, as embeddings that were computed beforehand.

    one image's embeddings [t, S], t <= T  --zeros below-->  context [T, S]

They lie beside the images as .npy files, as members of a shard's samples, or in a column of a
table. An item of a set with contexts is (image, context) instead of (image, label). T is the
longest one's unless `data.context_length` says it. Nothing is unpickled.

Dimensions: T embeddings, S width of one.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.shards import ShardReader

if TYPE_CHECKING:
    import datasets


class Contexts(Protocol):
    """Contexts by number; can be pickled."""

    def __getitem__(self, item: int) -> Tensor:
        """Return one, floats [T, S]. Raises ValueError naming where it lies if it cannot be."""


class WithContexts(Dataset):
    """Items (image, context) of a data set of (image, label).

    Args:
        images: the set.
        contexts: of these and of other images.
        indices: which of the contexts is that of each image.
    """

    def __init__(self, images: Dataset, contexts: Contexts, indices: Iterable[int]):
        self.images, self.contexts = images, contexts
        self.indices = np.array(list(indices), np.int64)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return (image, context). Raises ValueError naming what of them cannot be read."""
        return self.images[index][0], self.contexts[int(self.indices[index])]

    def item_name(self, index: int) -> str:
        """Return what the image is called."""
        return getattr(self.images, "item_name", "item {}".format)(index)

    def lost_items(self) -> list[int]:
        """Return the items whose images are lost."""
        return getattr(self.images, "lost_items", list)()


class FileContexts:
    """.npy files, in the order of their images.

    Args:
        files: their paths.
        length: T; None is the longest one's.

    Raises:
        ValueError: a file is missing, or the largest cannot be read.
    """

    def __init__(self, files: Sequence[str], length: int | None):
        self.files = list(files)
        sizes = [_file_size(file) for file in self.files]
        largest = sizes.index(max(sizes))
        self.shape = _shape_of(self._read(largest), self.files[largest], length)

    def __getitem__(self, item: int) -> Tensor:
        return as_context(self._read(item), self.files[item], self.shape)

    def _read(self, item: int) -> np.ndarray:
        return read_npy(Path(self.files[item]).read_bytes, self.files[item])


class MemberContexts:
    """.npy members of tar shards' samples.

    Args:
        readers: of one set of shards or several, each after the other.
        length: T; None is the longest one's.

    Raises:
        ValueError: the largest cannot be read.
    """

    def __init__(self, readers: Sequence[ShardReader], length: int | None):
        self.readers, self.ends = list(readers), np.cumsum([len(r) for r in readers])
        largest = int(np.concatenate([r.index.size for r in readers]).argmax())
        self.shape = _shape_of(*self._read(largest), length)

    def __getitem__(self, item: int) -> Tensor:
        return as_context(*self._read(item), self.shape)

    def _read(self, item: int) -> tuple[np.ndarray, str]:
        number = int(np.searchsorted(self.ends, item, side="right"))
        reader = self.readers[number]
        own = item - int(self.ends[number]) + len(reader)
        where = reader.where(own)
        return read_npy(lambda: reader.read(own), where), where


class ColumnContexts:
    """A column of tables of the `datasets` library: one embedding a row, or a list of them.

    Args:
        tables: one or several, each after the other.
        column: its name.
        length: T; None is the longest one's.

    Raises:
        ValueError: the column holds something else.
    """

    def __init__(self, tables: Sequence["datasets.Dataset"], column: str, length: int | None):
        self.name = f"data.context_column={column!r}"
        kind = tables[0].features[column]
        longest, self.column = 0, column
        if length is None:
            lengths = [n for table in tables for n in _lengths(table, column)]
            if not lengths:
                raise ValueError(f"{self.name} is {kind}; lists of numbers, or of such are wanted.")
            longest = int(np.argmax(lengths))
        self.tables = [table.select_columns([column]).with_format("numpy") for table in tables]
        self.ends = np.cumsum([len(table) for table in tables])
        self.shape = _shape_of(*self._read(longest), length)

    def __getitem__(self, item: int) -> Tensor:
        return as_context(*self._read(item), self.shape)

    def _read(self, item: int) -> tuple[np.ndarray, str]:
        number = int(np.searchsorted(self.ends, item, side="right"))
        row = item - int(self.ends[number]) + len(self.tables[number])
        found = self.tables[number][row][self.column]
        if isinstance(found, np.ndarray) and found.dtype == object:  # a list of lists
            found = np.stack([np.asarray(one) for one in found])
        return np.asarray(found), f"{self.name}, row {row}"


def _lengths(table: "datasets.Dataset", column: str) -> list[int]:
    """Return how long the list in each row is; nothing if the column has no lists.

    Chunk by chunk: as one array, a column has at most 2^31 numbers, and is copied.
    """
    import pyarrow
    import pyarrow.compute

    lengths: list[int] = []
    for chunk in table.select_columns([column]).with_format("arrow")[:].column(column).chunks:
        values = chunk.storage if isinstance(chunk, pyarrow.ExtensionArray) else chunk  # Array2D
        try:
            found = pyarrow.compute.list_value_length(values).to_numpy(zero_copy_only=False)
        except (pyarrow.ArrowNotImplementedError, pyarrow.ArrowInvalid):
            return []
        lengths += np.nan_to_num(found, nan=0).astype(int).tolist()
    return lengths


def read_npy(read: Callable[[], bytes], name: str) -> np.ndarray:
    """Return the array in the bytes of an .npy file.

    Args:
        read: gives them.
        name: what an error calls it.

    Raises:
        ValueError: they cannot be had, are cut short, or hold objects.
    """
    try:
        return npy.read_array(io.BytesIO(read()), allow_pickle=False)
    except Exception as error:  # of the disk, the header, its numbers: half a dozen kinds
        raise ValueError(
            f"the context {name} cannot be read as an .npy file of numbers ({error}). Write it "
            "again, or remove it with its image."
        ) from error


def as_context(array: np.ndarray, name: str, shape: tuple[int, int]) -> Tensor:
    """Return embeddings [t, S] or [S] as a context float32 [T, S], with zeros below.

    Args:
        array: them.
        name: what an error calls them.
        shape: T and S.

    Raises:
        ValueError: they are no finite floats, too many, or of another width.
    """
    length, size = shape
    rows = _rows(array, name)
    if rows.shape[1] != size or len(rows) > length:
        raise ValueError(
            f"the context {name} has {len(rows)} embeddings of width {rows.shape[1]}; at most "
            f"{length} of width {size} fit (data.context_length is that number in training)."
        )
    context = torch.zeros(length, size)
    with np.errstate(over="ignore"):
        context[: len(rows)] = torch.from_numpy(rows.astype(np.float32))
    if not torch.isfinite(context).all():
        raise ValueError(f"the context {name} has numbers that are not finite as float32.")
    return context


def to_half(context: Tensor, name: str) -> Tensor:
    """Return a context as float16. Raises ValueError, with its `name`, if that cannot hold it."""
    half = context.to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(
            f"the context {name} reaches {float(context.abs().max()):g}, beyond what float16 holds "
            "(65504). Divide all embeddings by a number first."
        )
    return half


def check_context_options(
    context: str | None, context_length: int | None, num_classes: int | None
) -> None:
    """Raise `ValueError` for options that do not go together: a context takes a label's place."""
    if context is not None and num_classes:
        raise ValueError(
            f"data.num_classes={num_classes} and contexts ({context}) exclude each other: the "
            "condition of an image is its label or its context. Leave one of them out."
        )
    if context is None and context_length is not None:
        raise ValueError(
            f"data.context_length={context_length} is for data with contexts; say where they are "
            "(data.context, data.context_column), or leave it out."
        )
    if context_length is not None and context_length < 1:
        raise ValueError(f"data.context_length={context_length} must be 1 or more.")


def spread_order(size: int) -> list[int]:
    """Return 0 … size - 1 in an order of which any first ones lie evenly spaced: bits reversed."""
    bits = max(size - 1, 0).bit_length()
    reverse = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [index for index in reverse if index < size]


def _rows(array: Any, name: str) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.dtype.kind != "f" or not array.shape[1]:
        raise ValueError(
            f"the context {name} has shape {array.shape} and dtype {array.dtype}; it must be "
            "floats [number of embeddings, width]."
        )
    return array


def _shape_of(array: np.ndarray, name: str, length: int | None) -> tuple[int, int]:
    """Return T, unless it is given, and S by the longest context."""
    rows = _rows(array, name)
    return (max(len(rows), 1) if length is None else length), rows.shape[1]


def _file_size(file: str) -> int:
    try:
        return Path(file).stat().st_size
    except OSError as error:
        raise ValueError(
            f"the context {file!r} is missing: every picture needs one beside it, with its name up "
            "to the suffix and data.context after it."
        ) from error
