"""Labels of every source: integers of any type stay as they are, words become classes."""

import logging
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MOST_CLASSES = 2**20  # a network has an embedding for each
COLUMNS = ("label", "labels", "class", "cls", "target")  # the first that exists is taken


def nfc(word: str) -> str:
    """Return a name in Unicode's form NFC; macOS writes files' names in NFD."""
    return unicodedata.normalize("NFC", word)


def read_labels(values: Any, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels int64 [N] and class names; for labels that are integers, there are no names.

    Args:
        values: an array or a list with one value per image: integers of any type, such as 1.0 or
            "1", or words. Words are compared in NFC, and the classes are sorted by name.
        where: where the labels come from; error messages begin with it.

    Raises:
        ValueError: a value is neither integer nor word, such as 0.5, None or a list.
    """
    array = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=object)
    if array.size != len(array):  # neither [N] nor [N,1]
        raise _unusable(where, f"the shape {list(array.shape)}")
    cells = [v.decode() if isinstance(v, bytes) else v for v in array.reshape(-1).tolist()]
    if cells and all(isinstance(value, str) for value in cells):
        try:
            cells = [int(text) if text.strip().isdecimal() else float(text) for text in cells]
        except ValueError:
            words = np.array([nfc(text.strip()) for text in cells], dtype=object)
            names, indices = np.unique(words, return_inverse=True)
            return torch.from_numpy(indices.astype(np.int64)), tuple(names)
    for value in cells:
        if not isinstance(value, int | float) or value != value // 1 or abs(value) >= 2**63:
            raise _unusable(where, repr(value))
    return torch.tensor([int(value) for value in cells], dtype=torch.int64), ()


def _unusable(where: str, value: str) -> ValueError:
    return ValueError(
        f"{where} has {value}: labels are one integer or one word per image. Convert them, or set "
        "data.num_classes=0 to train without labels."
    )


def check_labels(
    labels: Tensor, num_classes: int | None, names: Sequence[str], where: str
) -> tuple[str, ...]:
    """Return a name for each class of the labels int64 [N].

    The number of classes is `num_classes` or, if that is not set, the number of `names`. If there
    are no names either, it is the largest label + 1. The result is `names` if there is one for each
    class, else the classes' numbers. Classes without images are logged: labels that start at 1
    leave class 0 empty. Messages call the data `where`.

    Raises:
        ValueError: a label is not in 0 … the number of classes - 1, or there are more than
            `MOST_CLASSES` classes.
    """
    low, high = int(labels.min()), int(labels.max())
    count = num_classes or len(names) or high + 1
    if low < 0 or high >= count:
        raise ValueError(
            f"{where}: the labels are from {low} to {high}, but must be in 0 … "
            f"{max(count - 1, 0)}. data.num_classes=0 trains without labels."
        )
    if count > MOST_CLASSES:
        raise ValueError(
            f"{where}: the labels are from {low} to {high}, and {count} classes are more than "
            f"{MOST_CLASSES}: number the classes from 0, or set data.num_classes=0."
        )
    empty = (torch.bincount(labels, minlength=count) == 0).nonzero().flatten().tolist()
    if empty:
        shown = ", ".join(map(str, empty[:5])) + (", …" if len(empty) > 5 else "")
        logger.warning(
            "labels    %s: %d of %d classes have no image (%s)", where, len(empty), count, shown
        )
    return tuple(names) if len(names) == count else tuple(map(str, range(count)))


def find_label_column(table: Any, name: str, used: Mapping[str, str]) -> str | None:
    """Return the name of the label column of a table of the `datasets` library, or None.

    It is the first column named as in `COLUMNS`, or else the only column of the type `ClassLabel`.
    Columns that are not used are logged.

    Args:
        table: the table.
        name: name of the data, for the log.
        used: its keys name columns with other contents, which are not taken for labels.

    Raises:
        ValueError: several columns are of the type `ClassLabel`, and none is named as in `COLUMNS`.
    """
    import datasets

    features = {column: kind for column, kind in table.features.items() if column not in used}
    named = [column for column in COLUMNS if column in features]
    classes = [n for n, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    if len(classes) > 1 and not named:
        raise ValueError(
            f"several columns have classes: {', '.join(classes)}. Set data.label_column, or "
            "data.num_classes=0 to train without labels."
        )
    chosen = next(iter([*named, *classes]), None)
    others = [n for n in features if n != chosen and not n.startswith("__")]
    if others:
        taken = "there are no labels" if chosen is None else f"the labels are in {chosen!r}"
        logger.log(
            logging.WARNING if chosen is None else logging.INFO,
            "labels    %s: %s; columns that are not used: %s (data.label_column)",
            name, taken, ", ".join(others),
        )  # fmt: skip
    return chosen


def label_text(content: bytes) -> str:
    """Return the label in a .cls file's `content`. Raises ValueError if it is not UTF-8."""
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"a .cls file is no text in UTF-8: {content[:20]!r}") from None
