"""Images from a Hugging Face data set: a folder of `save_to_disk`, files (parquet, pictures …), or
a name on the hub.

The `datasets` library finds, downloads and memory-maps; the pictures stay compressed on the disk
and are decoded here as they are asked for. C channels, H height, W width.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.contexts import ColumnContexts, WithContexts, check_context_options
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.pictures import check_picture_options, common_size, read_picture
from tread_zoo.data.split import choose_num_classes, split_held_out
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register

if TYPE_CHECKING:
    import datasets

TEST_SPLITS = ("test", "validation")  # taken in this order where none is named
FRACTION = 0.1  # split off where the set has neither


@register("data", "hf")
def hf(
    path: str,
    config: str | None = None,
    split: str | None = None,
    test_split: str | None = None,
    held_out: float | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    num_classes: int | None = None,
    image_size: int | None = None,
    channels: int = 3,
    streaming: bool = False,
    context_column: str | None = None,
    context_length: int | None = None,
) -> ImageData:
    """Return a data set that the `datasets` library reads.

    path: a folder that `save_to_disk` wrote, a folder of parquet files or pictures, or a name on
      the hub (owner/name). Whatever holds a separator at its start, or exists, is a folder.
    config: the configuration of a set that has several.
    split: what is trained on; None is `train`. A name on the hub and a folder of files also take
      a part, as in train[:10%].
    test_split: what is held out; None is `test` or `validation`, where there is one.
    held_out: a fraction split off the training part instead; None takes the test split, and 0.1
      where there is none.
    image_column: None finds the one column of pictures.
    label_column: None finds the one column of class labels, or whole numbers named label or
      labels; without any the pictures are unlabelled.
    num_classes: None is what the label column says; 0 drops the labels.
    image_size: the shorter side is resized to it and the centre cropped. Not given, all pictures
      must have one size, which is checked here by reading every picture's header.
    channels: 1 (grey) or 3 (RGB).
    streaming: refused when true, see below.
    context_column: embeddings, one or a list of them a row; they take the place of the labels.
    context_length: embeddings of an image, others filled up with zeros; None is the most there are.

    Raises ValueError, naming the field, for what does not fit, and where `datasets` is missing.

    A streamed set has no random access: it is shuffled in a buffer, whose content a resumed run
    could only have by reading the epoch again from its start. Streaming is refused, not offered
    inexactly.
    """
    check_picture_options(image_size, channels)
    check_context_options(context_column, context_length, num_classes)
    if context_column is not None:
        num_classes = 0
    if streaming:
        raise ValueError(
            "data.streaming=true cannot be trained on: a resumed run would not see what the "
            "unbroken one sees, or read its epoch again. Leave it out, and the set is downloaded "
            "once and memory-mapped; take a part of a large one (\"data.split='train[:10%]'\"), "
            "or write it into tar shards and train with data=webdataset."
        )
    if test_split is not None and held_out is not None:
        raise ValueError(
            f"data.test_split={test_split!r} and data.held_out={held_out!r} exclude each other: "
            "hold out a split of its own, or a fraction of the training part."
        )
    if num_classes is not None and num_classes < 0:
        raise ValueError(f"data.num_classes={num_classes} must be 0 (no labels) or more.")
    splits = _Splits(path, config)
    split = split or splits.only() or "train"
    table = splits.table(split, "data.split")
    if split == test_split:
        raise ValueError(
            f"data.test_split={test_split!r} is what is trained on; name another, or set "
            "data.held_out=0.1 to split a tenth off."
        )
    if test_split is None and held_out is None:
        others = set(splits.names()) - {split.partition("[")[0]}
        test_split = next((name for name in TEST_SPLITS if name in others), None)
    images = _find_image_column(table, image_column)
    labels = None if num_classes == 0 else _find_label_column(table, label_column)
    num_classes, class_names = _find_classes(table, labels, num_classes)
    columns = _Columns(images, labels, num_classes)
    train = HFDataset(f"{path}, split {split}", table, columns, image_size, channels)
    test: HFDataset | None = None
    tables = [table]
    if test_split is not None:
        table = splits.table(test_split, "data.test_split")
        test = HFDataset(f"{path}, split {test_split}", table, columns, image_size, channels)
        tables.append(table)
    else:
        kept, split_off = split_held_out(train.labels, FRACTION if held_out is None else held_out)
        test = train.subset(split_off) if len(split_off) else None
        train = train.subset(kept)
    contexts = _find_contexts(tables, context_column, context_length)

    def conditioned(part: HFDataset, before: int) -> Dataset:
        if contexts is None:
            return part
        return WithContexts(part, contexts, (part.rows + before).tolist())

    return ImageData(
        name=f"hf:{splits.name}",  # never mistaken for a built-in source
        train=conditioned(train, 0),
        held_out=None if test is None else conditioned(test, sum(map(len, tables[:-1]))),
        image_size=(image_size, image_size) if image_size else common_size(_sources(train, test)),
        channels=channels,
        num_classes=num_classes,
        class_names=class_names,
        context=None if contexts is None else contexts.shape,
    )


@dataclass(frozen=True)
class _Columns:
    """Where a table has its pictures and labels (None: unlabelled, 0 classes)."""

    images: str
    labels: str | None
    num_classes: int


class HFDataset(Dataset):
    """Pictures of a table's column, decoded as they are asked for; `name` is the table's."""

    def __init__(
        self,
        name: str,
        table: "datasets.Dataset",
        columns: _Columns,
        image_size: int | None,
        channels: int,
    ):
        import datasets

        if not len(table):
            raise ValueError(f"data.path={name} has no rows.")
        self.name, self.column = name, columns.images
        self.image_size, self.channels = image_size, channels
        self.labels = _read_labels(name, table, columns)
        # As stored: a picture that cannot be decoded is found, and named, where it is decoded.
        self.table = table.select_columns([self.column]).cast_column(
            self.column, datasets.Image(decode=False)
        )
        self.rows = torch.arange(len(table))

    def subset(self, indices: Tensor) -> "HFDataset":
        """Return the items `indices` int64 [K], on the same table."""
        part = copy.copy(self)
        part.rows, part.labels = self.rows[indices], self.labels[indices]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (image uint8 [C,H,W], label). Raises ValueError naming an unreadable picture."""
        name, source = self.source(index)
        image = read_picture(source, name, self.image_size, self.channels)
        return image, int(self.labels[index])

    def source(self, index: int) -> tuple[str, str | bytes]:
        """Return what a picture is called, and its file or its content."""
        row = self.table[int(self.rows[index])][self.column]
        if row is not None and row["bytes"] is not None:
            return self.item_name(index), row["bytes"]
        if row is None or row["path"] is None:
            raise ValueError(f"{self.item_name(index)} has no picture.")
        return row["path"], row["path"]

    def item_name(self, index: int) -> str:
        """Return where item `index` is in the data set."""
        return f"{self.name}, row {int(self.rows[index])}"


def _sources(*parts: HFDataset | None) -> Iterator[tuple[str, str | bytes]]:
    for part in parts:
        if part is not None:
            yield from (part.source(index) for index in range(len(part)))


class _Splits:
    """The parts of a data set by name; downloads and prepares what is not there yet."""

    def __init__(self, path: str, config: str | None):
        self.path, self.config = path, config
        folder = Path(path).expanduser()
        if not folder.exists() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
            raise ValueError(
                f"data.path={path!r} does not exist; set data.path to a folder, or to a name on "
                "the hub (owner/name)."
            )
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                'data.name=hf needs the datasets library: run `pip install "tread-zoo[hf]"` (or '
                "`pip install datasets`)."
            ) from error
        self.saved = any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))
        self.folder = str(folder) if folder.exists() else path
        self.name = folder.resolve().name if folder.exists() else path
        found = self._load(None)
        if isinstance(found, datasets.Dataset):  # saved without splits
            found = {str(found.split or "train"): found}
        self.tables: dict[str, Any] = dict(found)

    def names(self) -> list[str]:
        return sorted(self.tables)

    def only(self) -> str | None:
        """Return the name of the one split, where there is one."""
        return self.names()[0] if len(self.tables) == 1 else None

    def table(self, split: str, field: str) -> "datasets.Dataset":
        """Return a split, or a part of one, as in train[:10%]."""
        if split in self.tables:
            return self.tables[split]
        if "[" not in split or self.saved:
            raise unknown_name(field, split, self.tables)
        return self._load(split)

    def _load(self, split: str | None) -> Any:
        import datasets

        try:
            if self.saved:
                return datasets.load_from_disk(self.folder)
            return datasets.load_dataset(self.folder, name=self.config, split=split)
        except Exception as error:  # of the network, the hub, the files: a dozen kinds
            raise ValueError(
                f"data.path={self.path!r} (data.config={self.config!r}) cannot be loaded by the "
                f"datasets library: {type(error).__name__}: {error}. It must be a folder that "
                "save_to_disk wrote, a folder of parquet files or pictures, or a name on the hub, "
                "which needs the network the first time."
            ) from error


def _find_image_column(table: "datasets.Dataset", column: str | None) -> str:
    import datasets

    found = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
    if column is not None and column not in found:
        raise unknown_name("data.image_column", column, found)
    if column is None and len(found) != 1:
        raise ValueError(
            f"data.image_column is not set, and {len(found)} columns of {_listing(table)} hold "
            "pictures (the feature Image). "
            + ("Name one of them." if found else "Cast one: cast_column(name, datasets.Image()).")
        )
    return column or found[0]


def _find_label_column(table: "datasets.Dataset", column: str | None) -> str | None:
    """Return the column of the labels, or None where there is none."""
    import datasets

    whole = {name for name, kind in table.features.items() if _is_whole_number(kind)}
    named = [n for n, kind in table.features.items() if isinstance(kind, datasets.ClassLabel)]
    if column is not None:
        if column not in table.features:
            raise unknown_name("data.label_column", column, table.features)
        if column not in named and column not in whole:
            raise ValueError(
                f"data.label_column={column!r} is {table.features[column]}; labels must be whole "
                f"numbers. Convert it once: class_encode_column({column!r}), then save_to_disk."
            )
        return column
    usual = [name for name in ("label", "labels") if name in named or name in whole]
    if len(named) > 1 and not usual:
        raise ValueError(
            f"data.label_column is not set, and several columns hold classes: {', '.join(named)}. "
            "Name one of them, or set data.num_classes=0 to train without labels."
        )
    return next(iter([*usual, *named]), None)


def _find_contexts(
    tables: Sequence["datasets.Dataset"], column: str | None, length: int | None
) -> ColumnContexts | None:
    if column is None:
        return None
    for table in tables:
        if column not in table.features:
            raise unknown_name("data.context_column", column, table.features)
    return ColumnContexts(tables, column, length)


def _is_whole_number(kind: object) -> bool:
    return str(getattr(kind, "dtype", "")).lstrip("u").startswith("int")


def _find_classes(
    table: "datasets.Dataset", label_column: str | None, num_classes: int | None
) -> tuple[int, tuple[str, ...]]:
    """Return the number of classes and their names."""
    import datasets

    if label_column is None:
        if num_classes:
            raise ValueError(
                f"data.num_classes={num_classes}, but {_listing(table)} has no labels; set "
                "data.label_column, or data.num_classes=0."
            )
        return 0, ()
    kind = table.features[label_column]
    if isinstance(kind, datasets.ClassLabel):
        return choose_num_classes(num_classes, kind.num_classes), tuple(kind.names)
    if num_classes is None:
        num_classes = int(_column(table, label_column).max()) + 1
    return num_classes, tuple(str(label) for label in range(num_classes))


def _read_labels(name: str, table: "datasets.Dataset", columns: _Columns) -> Tensor:
    """Return int64 [N], all 0 without a column."""
    if columns.labels is None:
        return torch.zeros(len(table), dtype=torch.int64)
    labels = _column(table, columns.labels)
    low, high = labels.min(), labels.max()
    if labels.dtype.kind not in "iu" or low < 0 or high >= columns.num_classes:
        raise ValueError(
            f"data.path={name}: {columns.labels!r} reaches from {low} to {high}; every picture "
            f"must have a label from 0 to {columns.num_classes - 1} (-1 and nan: none). Choose "
            "another split, or set data.num_classes=0 to train without labels."
        )
    return torch.from_numpy(labels.astype(np.int64))


def _column(table: "datasets.Dataset", name: str) -> np.ndarray:
    return np.asarray(table.select_columns([name]).with_format("numpy")[:][name])


def _listing(table: "datasets.Dataset") -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in table.features.items())
