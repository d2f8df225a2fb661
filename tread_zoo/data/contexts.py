"""Contexts: what an image is made for, as embeddings that were computed beforehand.

    one image's embeddings [t, S], t <= T  --zeros below-->  context [T, S]

They are a column of a table: the path of an .npy file, or numbers. An item of a set with contexts
is (image, context) instead of (image, label). T is the longest one's unless `data.context_length`
says it. Nothing is unpickled.

Dimensions: T embeddings, S width of one.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    import datasets


def context_shape(table: "datasets.Dataset", column: str, length: int | None) -> tuple[int, int]:
    """Return (T, S) of a column, in numpy's format, of paths or of embeddings; T is `length`, or
    the longest one's. Raises ValueError if that cannot be read."""
    row = _longest(table.select_columns([column]), column) if length is None else 0
    rows = _as_rows(table[row][column], f"of row {row}")
    return length or max(len(rows), 1), rows.shape[1]


def _longest(table: "datasets.Dataset", column: str) -> int:
    """Return the row of the largest file or the longest list."""
    import pyarrow
    import pyarrow.compute

    cells = table.with_format("arrow")[:].column(column)
    if isinstance(cells.type, pyarrow.ExtensionType):  # datasets' Array2D
        cells = cells.cast(cells.type.storage_type)
    if pyarrow.types.is_string(cells.type):
        return int(np.argmax([os.path.getsize(path) for path in cells.to_pylist()]))
    lengths = pyarrow.compute.list_value_length(cells).fill_null(0)
    return int(np.argmax(lengths.to_numpy()))


def as_context(value: Any, name: str, shape: tuple[int, int]) -> Tensor:
    """Return embeddings [t, S] or [S], or those in an .npy file, as a context float32 [T, S] with
    zeros below. Raises ValueError for what cannot be read or is not finite, or does not fit."""
    length, size = shape
    rows = _as_rows(value, name)
    if (rows.size and rows.shape[1] != size) or len(rows) > length:
        raise ValueError(
            f"the context {name} has {len(rows)} embeddings of width {rows.shape[1]}; at most "
            f"{length} (data.context_length) of width {size} fit."
        )
    context = torch.zeros(length, size)
    with np.errstate(over="ignore"):
        context[: len(rows)] = torch.from_numpy(rows.astype(np.float32))
    if not torch.isfinite(context).all():
        raise ValueError(f"the context {name} has numbers that are not finite as float32.")
    return context


def load_npy(path: str | Path) -> np.ndarray:
    """Return the array in an .npy file. Raises ValueError if it is cut short or holds objects."""
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except Exception as error:  # of the disk, the header, its numbers: half a dozen kinds
        raise ValueError(f"{path} cannot be read as an .npy file of numbers ({error}).") from error
    return array


def _as_rows(value: Any, name: str) -> np.ndarray:
    """Return floats [t, S]."""
    array = np.atleast_2d(load_npy(value) if isinstance(value, str) else value)
    if array.ndim != 2 or array.dtype.kind != "f" or not array.shape[1]:
        raise ValueError(f"the context {name} is {array.dtype} {array.shape}, no floats [t, S].")
    return array
