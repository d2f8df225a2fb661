"""Contexts: what an image is made for, as embeddings that were computed beforehand.

    one image's embeddings [t, S], t <= T  --zeros below-->  context [T, S]

They are a column of a table: a path of an .npy file, or a list of numbers, or of such. An item of a
set with contexts is (image, context) instead of (image, label). T is the longest one's unless
`data.context_length` says it. Nothing is unpickled.

Dimensions: T embeddings, S width of one.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

if TYPE_CHECKING:
    import datasets


class ContextColumn:
    """Contexts by row of a table; `shape` is (T, S).

    Args:
        table: of the `datasets` library.
        column: of paths, or of embeddings.
        length: T; None is the longest one's.

    Raises:
        ValueError: the longest cannot be read, or is none.
    """

    def __init__(self, table: "datasets.Dataset", column: str, length: int | None):
        self.column, self.table = column, table.select_columns([column]).with_format("numpy")
        rows = self._read(_longest(self.table, column) if length is None else 0)
        self.shape = (max(len(rows), 1) if length is None else length), rows.shape[1]

    def __getitem__(self, row: int) -> Tensor:
        """Return one, float32 [T,S]. Raises ValueError saying where it lies if it cannot be."""
        return as_context(self._read(row), f"{self.column!r} of row {row}", self.shape)

    def _read(self, row: int) -> np.ndarray:
        value: Any = self.table[row][self.column]
        if isinstance(value, str):
            path = Path(value)
            return _as_rows(read_npy(path.read_bytes, value), value)
        if isinstance(value, np.ndarray) and value.dtype == object:  # a list of lists
            value = np.stack([np.asarray(one) for one in value])
        return _as_rows(np.asarray(value), f"{self.column!r} of row {row}")


def _longest(table: "datasets.Dataset", column: str) -> int:
    """Return the row of the largest file or the longest list."""
    import pyarrow
    import pyarrow.compute

    chunks = table.with_format("arrow")[:].column(column).chunks
    lengths: list[int] = []
    for chunk in chunks:  # as one array, a column has at most 2^31 numbers, and is copied
        values = chunk.storage if isinstance(chunk, pyarrow.ExtensionArray) else chunk  # Array2D
        if pyarrow.types.is_string(values.type):
            lengths += [os.path.getsize(path) for path in values.to_pylist()]
        else:
            counts = pyarrow.compute.list_value_length(values).to_numpy(zero_copy_only=False)
            lengths += np.nan_to_num(counts, nan=0).astype(int).tolist()
    return int(np.argmax(lengths))


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
            f"the context {name} cannot be read as an .npy file of numbers ({error})."
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
    rows = _as_rows(array, name)
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


def spread_order(size: int) -> list[int]:
    """Return 0 … size - 1 in an order of which any first ones lie evenly spaced: bits reversed."""
    bits = max(size - 1, 0).bit_length()
    reverse = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
    return [index for index in reverse if index < size]


def _as_rows(array: np.ndarray, name: str) -> np.ndarray:
    array = array[None] if array.ndim == 1 else array
    if array.ndim != 2 or array.dtype.kind != "f" or not array.shape[1]:
        raise ValueError(
            f"the context {name} has shape {array.shape} and dtype {array.dtype}; it must be "
            "floats [number of embeddings, width]."
        )
    return array
