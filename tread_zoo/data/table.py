"""Pictures as a column of one table of the `datasets` library: folders, parquet, hub, tar shards.

The library finds, downloads and memory-maps; pictures stay compressed on the disk and are decoded
here when they are read. Labels and contexts are columns beside them.

C channels, H height, W width, N rows.
"""

import copy
import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.utils.data import Dataset

from tread_zoo.data.contexts import ContextColumn
from tread_zoo.data.dataset import ImageData
from tread_zoo.data.pictures import SUFFIXES, read_picture, survey
from tread_zoo.data.split import check_labels, split_parts
from tread_zoo.errors import unknown_name
from tread_zoo.registry import register

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

Fraction = Annotated[float, Field(ge=0, lt=1)]
TEST_SPLITS = ("test", "validation")  # taken in this order where none is named


class PictureTable(Dataset):
    """Some rows of a table: pictures, with their labels or contexts.

    Args:
        table: of the `datasets` library.
        column: of the pictures, as `Image(decode=False)`: path or content.
        labels: int64 [N].
        contexts: in place of labels, where there are some.
        image_size: resize and crop to this square; None leaves the size.
        channels: 1 (grey) or 3 (RGB).
        shape: (H, W) that all must have then.
    """

    def __init__(
        self,
        table: "datasets.Dataset",
        column: str,
        labels: Tensor,
        contexts: ContextColumn | None,
        image_size: int | None,
        channels: int,
        shape: tuple[int, int],
    ):
        self.table, self.column, self.contexts = table, column, contexts
        self.labels, self.rows = labels, torch.arange(len(table))
        self.image_size, self.channels, self.shape = image_size, channels, shape

    def subset(self, rows: Tensor) -> "PictureTable":
        """Return the items `rows` int64 [K], on the same table."""
        part = copy.copy(self)
        part.rows, part.labels = self.rows[rows], self.labels[rows]
        return part

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Return (image uint8 [C,H,W], label or context).

        Raises:
            ValueError: the picture cannot be read, or is of another size.
        """
        row = int(self.rows[index])
        image = read_picture(
            picture_at(self.table, self.column, row), self.image_size, self.channels
        )
        if image.shape[1:] != self.shape:
            raise ValueError(
                f"the picture is {image.shape[1]}x{image.shape[2]}, others are {self.shape[0]}x"
                f"{self.shape[1]} (height x width): set data.image_size"
            )
        return image, int(self.labels[index]) if self.contexts is None else self.contexts[row]

    def item_name(self, index: int) -> str:
        """Return the file of item `index`, or its row."""
        row = int(self.rows[index])
        return (self.table[row][self.column] or {}).get("path") or f"row {row}"


def picture_at(table: "datasets.Dataset", column: str, row: int) -> str | bytes:
    """Return the path or the content of a picture."""
    value = table[row][column]
    if value is None or (value["bytes"] is None and value["path"] is None):
        raise ValueError("the row has no picture")
    return value["path"] if value["bytes"] is None else value["bytes"]


# Sources ------------------------------------------------------------------------------------------


@register("data", "image_folder")
def image_folder(
    path: str,
    image_size: PositiveInt | None = None,
    channels: Literal[1, 3] = 3,
    held_out: Fraction = 0.1,
    num_classes: NonNegativeInt | None = None,
    context: str | None = None,
    context_length: PositiveInt | None = None,
) -> ImageData:
    """Return the pictures under a folder.

    Args:
        path: with sub-folders, each is a class (in the order of their names) and all pictures under
            it, however deep, are in it; without, its pictures are unlabelled. Names that begin with
            a dot are left out.
        image_size: the shorter side is resized to it and the centre cropped, to a square. Without
            it, all pictures must have one size.
        channels: 1 (grey) or 3 (RGB).
        held_out: the fraction split off, the same files in every run.
        num_classes: None for the number of sub-folders; 0 drops the labels.
        context: what follows a picture's name in that of its embeddings: `context.npy` finds
            cat.context.npy beside cat.png. They take the place of the labels.
        context_length: embeddings of an image, others filled up with zeros; None is the most there
            are.
    """
    import datasets

    root = Path(path).expanduser()
    files, labels, names = _find_pictures(root, context)
    columns: dict[str, Any] = {"image": files}
    if context is not None:
        columns["context"] = [f"{os.path.splitext(f)[0]}.{context.lstrip('.')}" for f in files]
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    if names:
        table = table.add_column("label", labels, feature=datasets.ClassLabel(names=names))
    return _picture_data(
        f"{root.name}/",  # never mistaken for a built-in source
        [table],
        held_out=held_out,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        context_column=None if context is None else "context",
        context_length=context_length,
    )


@register("data", "hf")
def hf(
    path: str,
    config: str | None = None,
    split: str | None = None,
    test_split: str | None = None,
    held_out: Fraction | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    num_classes: NonNegativeInt | None = None,
    image_size: PositiveInt | None = None,
    channels: Literal[1, 3] = 3,
    context_column: str | None = None,
    context_length: PositiveInt | None = None,
) -> ImageData:
    """Return a data set that the `datasets` library reads.

    A streamed set has no random access, so a resumed run could not see what the unbroken one would
    have: sets are downloaded and memory-mapped.

    Args:
        path: a folder that `save_to_disk` wrote, a folder of parquet files or pictures, or a name
            on the hub (owner/name).
        config: the configuration of a set that has several.
        split: what is trained on; None is `train`. A name on the hub and a folder of files also
            take a part, as in train[:10%].
        test_split: what is held out; None is `test` or `validation`, where there is one.
        held_out: a fraction split off the training part instead; where there is no test split,
            None is 0.1.
        image_column: None finds the one column of pictures.
        label_column: None finds the one column of class labels, or whole numbers named label or
            labels; without any the pictures are unlabelled.
        num_classes: None is what the label column says; 0 drops the labels.
        image_size, channels: as of `image_folder`.
        context_column: embeddings, one or a list of them a row; they take the place of the labels.
        context_length: as of `image_folder`.
    """
    import datasets

    folder = Path(path).expanduser()
    saved = any((folder / name).exists() for name in ("dataset_dict.json", "state.json"))
    where = str(folder) if folder.exists() else path

    def load(part: str | None) -> Any:
        if saved:
            return datasets.load_from_disk(where)
        return _load(where, name=config, split=part)

    loaded = load(None)
    if isinstance(loaded, datasets.Dataset):  # saved without splits
        loaded = {str(loaded.split or "train"): loaded}
    only = next(iter(loaded)) if len(loaded) == 1 else "train"
    split = split or only
    if test_split is None and held_out is None:
        others = [name for name in TEST_SPLITS if name in loaded and name != split.split("[")[0]]
        test_split = next(iter(others), None)

    def table_of(part: str, field: str) -> "datasets.Dataset":
        if part in loaded:
            return loaded[part]
        if "[" not in part or saved:
            raise unknown_name(field, part, loaded)
        return load(part)

    tables = [table_of(split, "data.split")]
    if test_split is not None and held_out is None:
        tables.append(table_of(test_split, "data.test_split"))
    return _picture_data(
        f"hf:{folder.resolve().name if folder.exists() else path}",
        tables,
        held_out=held_out,
        image_column=image_column,
        label_column=label_column,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        context_column=context_column,
        context_length=context_length,
    )


@register("data", "webdataset")
def webdataset(
    path: str,
    image_size: PositiveInt | None = None,
    channels: Literal[1, 3] = 3,
    held_out: Fraction | None = None,
    held_out_path: str | None = None,
    num_classes: NonNegativeInt | None = None,
    context: str | None = None,
    context_length: PositiveInt | None = None,
) -> ImageData:
    """Return the pictures in tar shards, which `datasets` copies once into its cache.

    Args:
        path: a folder of .tar files, one file, or a pattern: `train-{000..127}.tar`,
            `train-*.tar`; also of `https://…` and what else fsspec knows. A sample is a picture
            and, with labels, a `.cls`.
        image_size, channels: as of `image_folder`.
        held_out: a fraction split off; None is 0.1, or nothing where there is `held_out_path`.
        held_out_path: shards of their own for the held-out part.
        num_classes: the largest label + 1 unless given; 0 drops the labels.
        context: the suffix of a sample's embeddings, `context.npy`; they take the place of the
            labels.
        context_length: as of `image_folder`.
    """

    def load(pattern: str) -> "datasets.Dataset":
        where = os.path.expanduser(pattern)
        files = [f"{where}/*.tar"] if os.path.isdir(where) else expand_braces(where)
        return _load("webdataset", data_files={"train": files}, split="train")

    tables = [load(path)]
    if held_out_path is not None:
        tables.append(load(held_out_path))
    return _picture_data(
        f"{Path(path).name}:tar",  # never mistaken for a built-in source
        tables,
        held_out=held_out,
        label_column="cls" if "cls" in tables[0].features else None,
        num_classes=num_classes,
        image_size=image_size,
        channels=channels,
        context_column=context,
        context_length=context_length,
    )


def _load(where: str, **options: Any) -> Any:
    """Return what `datasets.load_dataset` does; its errors name the reason."""
    import datasets

    try:
        return datasets.load_dataset(where, **options)
    except (datasets.exceptions.DatasetGenerationError, tarfile.TarError) as error:
        files = options.get("data_files", {}).get("train", [where])
        raise ValueError(
            f"data.path: {files[0]} cannot be read: {error.__cause__ or error}"
        ) from error


def expand_braces(pattern: str) -> list[str]:
    """Return what the ranges {000..127} of a pattern stand for."""
    match = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    names = (
        pattern[: match.start()] + f"{number:0{len(first)}d}" + pattern[match.end() :]
        for number in range(int(first), int(last) + 1)
    )
    return [name for part in names for name in expand_braces(part)]


# Columns ------------------------------------------------------------------------------------------


def _picture_data(
    name: str,
    tables: list["datasets.Dataset"],
    *,
    held_out: float | None,
    num_classes: int | None,
    image_size: int | None,
    channels: int,
    context_column: str | None,
    context_length: int | None,
    image_column: str | None = None,
    label_column: str | None = None,
) -> ImageData:
    """Return the data in a table of the training part, and perhaps one of a test part."""
    import datasets

    columns = [column for column in tables[0].features if all(column in t.features for t in tables)]
    table = datasets.concatenate_datasets([one.select_columns(columns) for one in tables])
    images = _image_column(table, image_column)
    contexts = None
    if context_column is not None:
        if context_column not in table.features:
            raise unknown_name("data.context_column", context_column, table.features)
        if num_classes:
            raise ValueError(
                f"data.num_classes={num_classes} and contexts exclude each other: the condition "
                "of an image is its label or its context. Leave one of them out."
            )
        num_classes, contexts = 0, ContextColumn(table, context_column, context_length)
    labels, names = _labels_of(table, label_column, num_classes, name)
    # As stored: a picture that cannot be decoded is met, and named, where it is decoded.
    table = table.select_columns([images]).cast_column(images, datasets.Image(decode=False))
    size = survey(
        lambda row: picture_at(table, images, row), len(table), name,
        any_size=image_size is not None,
    )  # fmt: skip
    shape = size or (image_size or 0, image_size or 0)
    whole = PictureTable(table, images, labels, contexts, image_size, channels, shape)
    train, unseen = split_parts(labels, len(tables[0]), held_out, default=0.1)
    return ImageData(
        name=name,
        train=whole.subset(train),
        held_out=whole.subset(unseen) if len(unseen) else None,
        image_size=shape,
        channels=channels,
        num_classes=len(names),
        class_names=names,
        context=None if contexts is None else contexts.shape,
    )


def _image_column(table: "datasets.Dataset", column: str | None) -> str:
    import datasets

    images = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
    if column is not None and column not in images:
        raise unknown_name("data.image_column", column, images)
    if column is None and len(images) != 1:
        raise ValueError(
            f"data.image_column is not set, and {len(images)} columns hold pictures (the feature "
            f"Image), of {', '.join(f'{name} ({kind})' for name, kind in table.features.items())}. "
            + ("Name one of them." if images else "Cast one: cast_column(name, datasets.Image()).")
        )
    return column or images[0]


def _labels_of(
    table: "datasets.Dataset", column: str | None, num_classes: int | None, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels int64 [N] and the names of the classes; all 0 and none without labels."""
    import datasets

    features = table.features
    if column is None and num_classes != 0:
        classes = [n for n, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        whole = [
            n for n in ("label", "labels") if "int" in str(getattr(features.get(n), "dtype", ""))
        ]
        if len(classes) > 1 and not whole:
            raise ValueError(
                f"data.label_column is not set, and several columns hold classes: "
                f"{', '.join(classes)}. Name one, or set data.num_classes=0 to train without."
            )
        column = next(iter([*whole, *classes]), None)
    if column is not None and column not in features:
        raise unknown_name("data.label_column", column, features)
    if column is None and num_classes:
        raise ValueError(f"data.num_classes={num_classes}, but {name} has no labels.")
    if column is None or num_classes == 0:
        return torch.zeros(len(table), dtype=torch.int64), ()
    values = np.asarray(table.select_columns([column]).with_format("numpy")[:][column])
    if values.dtype.kind not in "iu":  # null among them makes floats of them
        raise ValueError(
            f"{name}: the labels in {column!r} are {features[column]}, some of them null or no "
            "whole numbers. Convert them once (class_encode_column, save_to_disk), or set "
            "data.num_classes=0 to train without."
        )
    labels, kind = torch.from_numpy(values.astype(np.int64)), features[column]
    own = tuple(kind.names) if isinstance(kind, datasets.ClassLabel) else ()
    count = check_labels(labels, num_classes or len(own) or None, name)
    return labels, own if len(own) == count else tuple(map(str, range(count)))


# Folders ------------------------------------------------------------------------------------------


def _find_pictures(root: Path, context: str | None) -> tuple[list[str], list[int], tuple[str, ...]]:
    """Return files, their labels and the class names (none: unlabelled), in a fixed order."""
    entries = sorted(entry for entry in root.iterdir() if not entry.name.startswith("."))
    folders = [entry for entry in entries if entry.is_dir()]
    loose = _pictures([str(entry) for entry in entries if entry.is_file()], root, context)
    if folders and loose:
        raise ValueError(
            f"data.path={str(root)!r} has pictures beside sub-folders ({Path(loose[0]).name!r} "
            f"beside {folders[0].name!r}); sort them all into sub-folders, one a class, or put "
            "them all in one flat folder (unlabelled)."
        )
    files, labels = loose, [0] * len(loose)
    for label, folder in enumerate(folders):
        under = [os.path.join(parent, n) for parent, _, names in os.walk(folder) for n in names]
        pictures = _pictures(sorted(under), folder, context)
        files += pictures
        labels += [label] * len(pictures)
    if not files:
        raise ValueError(
            f"data.path={str(root)!r} has no pictures ({', '.join(SUFFIXES)}), neither in it nor "
            "in sub-folders."
        )
    return files, labels, tuple(folder.name for folder in folders)


def _pictures(files: Iterable[str], folder: Path, context: str | None) -> list[str]:
    """Return those that are pictures; the other ones are counted in the log."""
    names = [file for file in files if not os.path.basename(file).startswith(".")]
    pictures = [file for file in names if file.lower().endswith(SUFFIXES)]
    others = Counter(
        os.path.splitext(file)[1].lower() or "no suffix"
        for file in names
        if not file.lower().endswith((*SUFFIXES, *([context] if context else [])))
    )
    if others:
        kinds = ", ".join(f"{count} {suffix}" for suffix, count in others.most_common())
        logger.warning("left out  %s: files that are no pictures: %s", folder, kinds)
    return pictures
