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
    """Return labels int64 [N] and class names, which are empty for integers.

    Args:
        values: an array or a list, one value per image. Either integers of any type, such as 1.0 or
            "1", or words, whose classes are sorted by name and compared in NFC.
        where: setting and name of the labels, with which an error begins.

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
    """Return the class names for labels int64 [N]: `names`, or numbers if `names` are too few or
    too many. Without `num_classes` and `names`, the number of classes is the largest label + 1.

    Classes without images are logged, because labels may start at 1. Raises ValueError if a label
    is outside 0 … num_classes - 1, or if there are more than `MOST_CLASSES` classes.
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
    """Return the label column of a table of the `datasets` library: the first named as in
    `COLUMNS`, else the only column of class labels, else None. `used` has the columns with other
    contents as keys; `name` is the data's, for the log.

    Columns that are not used are logged. Raises ValueError if several columns have class labels and
    none is named as in `COLUMNS`.
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
    """Return the label in a shard's .cls file. Raises ValueError if `content` is not text."""
    try:
        return content.decode().strip()
    except UnicodeDecodeError:
        raise ValueError(f"a .cls file is no text in UTF-8: {content[:20]!r}") from None
