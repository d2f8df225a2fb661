"""Contexts: embeddings of what an image is conditioned on, computed before training.

    embeddings of an image [t, S]  --fill up with zeros-->  context [T, S],    t <= T

A column of a table has the embeddings of each image, as numbers or as the path of an .npy file. The
items of such data are (image, context) instead of (image, label). T is `data.context_length` or, if
this is not set, the largest t in the data. Nothing is unpickled.

Dimensions: T embeddings of width S.
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
    """Return (T, S) of the contexts in `column` of `table`: T embeddings of width S.

    A cell is an array of embeddings or the path of an .npy file. If `length` is given, it is T, and
    S is read from the first row. If it is None, both are read from the row with the most
    embeddings. Raises ValueError if the row cannot be read."""
    row = _longest(table.select_columns([column]), column) if length is None else 0
    rows = _as_rows(table[row][column], f"of row {row}")
    return length or max(len(rows), 1), rows.shape[1]


def _longest(table: "datasets.Dataset", column: str) -> int:
    """Return the index of the row with the most embeddings. In a column of paths, it is the row
    whose file is the largest."""
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
    """Return an image's embeddings as a context, float32 [T, S], filled up with zeros.

    `value` is an array [t, S] of t <= T embeddings, or [S] of one, or the path of an .npy file with
    such an array. `shape` is (T, S). Error messages call the context `name`. Raises ValueError if
    the embeddings cannot be read, are not finite, or do not fit `shape`."""
    length, size = shape
    rows = _as_rows(value, name)
    if (rows.size and rows.shape[1] != size) or len(rows) > length:
        raise ValueError(
            f"the context {name} has {len(rows)} embeddings of width {rows.shape[1]}; expected are "
            f"at most {length} (data.context_length) of width {size}."
        )
    context = torch.zeros(length, size)
    with np.errstate(over="ignore"):
        context[: len(rows)] = torch.from_numpy(rows.astype(np.float32))
    if not torch.isfinite(context).all():
        raise ValueError(f"the context {name} is not finite as float32.")
    return context


def as_half(context: Tensor) -> Tensor:
    """Return a context as float16. Raises ValueError for NaN and for numbers beyond float16."""
    if not context.half().isfinite().all():
        raise ValueError(
            f"a context reaches {float(context.abs().max()):g}, beyond what float16 holds "
            "(65504): divide all embeddings by a constant first."
        )
    return context.half()


def load_npy(path: str | Path) -> np.ndarray:
    """Return the array in an .npy file. Raises ValueError if it is damaged or holds objects."""
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy raises half a dozen kinds
        raise ValueError(f"{path} cannot be read as an .npy file of numbers ({error}).") from error
    return array


def _as_rows(value: Any, name: str) -> np.ndarray:
    """Return `value`, an array or the path of an .npy file, as floats [t, S]: t embeddings of width
    S. Error messages call the context `name`."""
    array = np.atleast_2d(load_npy(value) if isinstance(value, str) else value)
    if array.ndim != 2 or array.dtype.kind != "f" or not array.shape[1]:
        raise ValueError(f"the context {name} is {array.dtype} {array.shape}, not floats [t, S].")
    return array
