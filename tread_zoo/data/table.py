"""Pictures in a table of the `datasets` library: from folders, parquet, the hub, tar shards.

The library finds, downloads and memory-maps files. Pictures stay compressed on the disk and are
decoded here, when they are read. Labels and contexts are other columns.

C channels, H height, W width, N rows.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch import Tensor

from tread_zoo.credentials import without_credentials
from tread_zoo.data.arrow import is_url
from tread_zoo.data.contexts import as_context, context_shape
from tread_zoo.data.dataset import ImageData, TableDataset
from tread_zoo.data.files import expand_braces
from tread_zoo.data.folders import SUFFIXES, columns_of, find_classes, folder_rows
from tread_zoo.data.labels import (
    COLUMNS,
    check_labels,
    find_label_column,
    label_text,
    nfc,
    read_labels,
)
from tread_zoo.data.pictures import Background, Colour, Crop, Size, open_picture, read_picture
from tread_zoo.data.split import evenly_spaced, split_data
from tread_zoo.data.text import Captions, caption_key, find_captions, with_contexts
from tread_zoo.errors import unknown_name
from tread_zoo.fields import Fraction
from tread_zoo.registry import register

if TYPE_CHECKING:
    import datasets

TEST_SPLITS = ("test", "validation")  # the first that exists is taken if none is named
_MEASURED = 64  # pictures whose size is read


@dataclass(eq=False)
class PictureTable(TableDataset):
    """Pictures in a table, with labels or contexts. The undecoded pictures are in the columns
    image, image1, …: in each row, one of these columns has the picture.

    Args:
        table, labels: see `TableDataset`.
        context: (T, S) if items have contexts, T embeddings of width S, in the place of labels.
        image_size: (H, W) to resize and crop to; None leaves the size.
        channels: 1 (grey) or 3 (RGB).
        shape: (H, W) of all pictures after resizing.
        background: RGBA colour behind transparent pictures.
        crop: "center" or "pad"; see `Pictures`.
        captions: the captions of the table's rows, if there are any.
    """

    context: tuple[int, int] | None
    image_size: tuple[int, int] | None
    channels: int
    shape: tuple[int, int]
    background: Colour
    crop: Crop
    captions: Captions | None

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Return (image uint8 [C,H,W], label or context). Raises ValueError if the picture cannot
        be read, or has another size."""
        row = self.table[int(self.rows[index])]
        source = _source(row)
        image = read_picture(source, self.image_size, self.channels, self.background, self.crop)
        if image.shape[1:] != self.shape:
            raise ValueError(
                f"the picture is {image.shape[1]}x{image.shape[2]}, others are {self.shape[0]}x"
                f"{self.shape[1]} (height x width): set data.image_size"
            )
        if self.context is None:
            return image, int(self.labels[index])
        return image, as_context(row["context"], f"of {self.item_name(index)}", self.context)

    def caption(self, index: int) -> str:
        """Return the caption of picture `index`, or "". Raises ValueError if it is not a text."""
        return "" if self.captions is None else self.captions[int(self.rows[index])]

    def stored(self, index: int) -> bytes:
        """Return the bytes of the file of picture `index`."""
        source = _source(self.table[int(self.rows[index])])
        return source if isinstance(source, bytes) else Path(source).read_bytes()

    def item_name(self, index: int) -> str:
        """Return the name of item `index` for logs: its file or its row."""
        cell = _picture(self.table[int(self.rows[index])])
        return (cell and cell["path"]) or super().item_name(index)


# Sources ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """Options of all sources of pictures.

    Args:
        image_size: side of the square that pictures are resized to, or height and width, as in
            [256,384]; null keeps the size, which must be the same for all pictures.
        channels: 1 (grey) or 3 (RGB).
        held_out: fraction held out, the same pictures in every run.
        num_classes: number of classes; 0 drops the labels. null counts the class names, or else the
            words among the labels; for integers without names, it is the largest label + 1.
        caption_column: column of the captions; null takes the first that exists of caption,
            captions, text, prompt and txt.
        text_encoder: a text encoder of CLIP or T5, a folder or a name on the hub. It turns captions
            into contexts, which take the place of the labels. They are computed once, into the
            cache folder, which suits small data; for large data use tread-zoo encode.
        text_length: embeddings per caption; longer captions are cut. null takes the length of the
            longest caption, at most 77.
        context_length: number of embeddings per image, filled up with zeros; null is the largest
            number in the data.
        background: colour behind transparent pictures, a name or #rrggbb.
        crop: `center` fills image_size and cuts off what is left over; `pad` shows the whole
            picture on `background`.
    """

    image_size: PositiveInt | Size | None = None
    channels: Literal[1, 3] = 3
    held_out: Fraction | None = 0.1
    num_classes: NonNegativeInt | None = None
    caption_column: str | None = None
    text_encoder: str | None = None
    text_length: PositiveInt | None = None
    context_length: PositiveInt | None = None
    background: Background = "white"
    crop: Crop = "center"

    def data_of(
        self,
        name: str,
        tables: list["datasets.Dataset"],
        image_columns: Sequence[str] | None,
        label_column: str | None,
        context_column: str | None,
        caption_column: str | None,
        caption_key: str = "",
    ) -> ImageData:
        """Return the pictures in `tables`, a training table and perhaps a test table, as
        `ImageData`.

        Args:
            name: name of the data, for logs and records.
            tables: the tables.
            image_columns: columns with pictures; a row's picture is in the first of them that is
                not null. None: the only column with pictures.
            label_column: column with labels; None: see `find_label_column`.
            context_column: column with embeddings, which take the place of labels, or None.
            caption_column: column with captions; None: see `find_captions`.
            caption_key: see `Captions`.
        """
        import datasets
        from PIL import ImageColor

        red, green, blue = ImageColor.getrgb(self.background)[:3]
        columns = [n for n in tables[0].features if all(n in t.features for t in tables)]
        table = datasets.concatenate_datasets([one.select_columns(columns) for one in tables])
        image_columns, context = image_columns or (_image_column(table),), None
        used = {column: f"image{number or ''}" for number, column in enumerate(image_columns)}
        num_classes = self.num_classes
        if context_column is not None:
            if num_classes:
                raise ValueError(f"data.num_classes={num_classes} and contexts exclude each other.")
            num_classes, used[context_column] = 0, "context"
        column = captions = None
        if context_column is None:
            column = find_captions(table, name, caption_column, {*used, label_column or ""})
        if column is not None:
            captions = Captions(table.select_columns([column]), caption_key)
        others = used if column is None else {**used, column: "caption"}
        labels, names = _read_labels(table, label_column, others, num_classes, name)
        table = table.select_columns(list(used)).rename_columns(used)
        # Pictures are decoded when they are read, so that a corrupt one costs one item.
        pictures = set(used.values()) - {"context"}
        for column in pictures:
            table = table.cast_column(column, datasets.Image(decode=False))
        if context_column is not None:
            table = table.with_format("numpy", columns=["context"], output_all_columns=True)
            context = context_shape(table, "context", self.context_length)
        size = self.image_size
        size = (size, size) if isinstance(size, int) else size
        shape = size or _size_of(table.select_columns([*pictures]), name)
        items = PictureTable(
            table, labels, context, size, self.channels, shape, (red, green, blue, 255), self.crop,
            captions,
        )  # fmt: skip
        data = split_data(
            name, items, len(tables[0]), self.held_out, names,
            image_size=shape, channels=self.channels, context=context,
        )  # fmt: skip
        if self.text_encoder is None:
            return data
        return with_contexts(data, self.text_encoder, self.text_length)


@register("data", "image_folder")
@dataclass(frozen=True, kw_only=True)
class ImageFolder(Pictures):
    """The pictures under a folder.

    Args:
        path: a folder. Its sub-folders, sorted by name, are the classes, with all pictures in them
            at any depth; without sub-folders, the pictures are unlabelled. Hidden files and folders
            are ignored, and a folder that links lead to is read once. It may have a metadata.csv or
            metadata.jsonl, with a row for each picture and its path as file_name, or EDM's
            dataset.json.
        label_column: column of the metadata; null takes one named label, labels, class, cls or
            target, else the sub-folders.
        caption_column: column of the metadata, or `txt` for files such as cat.txt beside cat.png.
            null takes the first that exists of caption, captions, text, prompt and txt.
        context: suffix of files with embeddings, which take the place of the labels: `context.npy`
            finds cat.context.npy beside cat.png.
    """

    path: str
    label_column: str | None = None
    context: str | None = None

    def load(self) -> ImageData:
        import datasets
        from pyarrow import ArrowInvalid, ArrowTypeError

        root, context = Path(self.path).expanduser(), self.context
        rows = folder_rows(root)
        own_labels = self.label_column or {*COLUMNS} & {name for r in rows.values() for name in r}
        labelled = self.num_classes != 0 and not own_labels
        files, labels, names = find_classes(root, context, labelled=labelled)
        columns = {**columns_of(rows, root, files), "image": files}
        stems = [os.path.splitext(file)[0] for file in files]
        if context is not None:
            columns["context"] = [f"{stem}.{context.lstrip('.')}" for stem in stems]
        elif any(os.path.exists(f"{stems[i]}.txt") for i in evenly_spaced(len(stems), _MEASURED)):
            columns["txt"] = [{"path": f"{stem}.txt"} for stem in stems]
        try:
            table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
        except (ArrowInvalid, ArrowTypeError) as error:
            raise ValueError(f"{root}: metadata with a column of several types: {error}") from error
        if names and not own_labels:
            table = table.add_column("label", labels, feature=datasets.ClassLabel(names=names))
        return self.data_of(
            f"{root.name}/",  # no built-in source has such a name
            [table], ["image"], self.label_column, context and "context", self.caption_column,
        )  # fmt: skip


@register("data", "hf")
@dataclass(frozen=True, kw_only=True)
class HuggingFace(Pictures):
    """A data set that the `datasets` library reads, downloaded and memory-mapped.

    Args:
        path: a folder from `save_to_disk`, a folder of parquet files or pictures, or a name on the
            hub (owner/name).
        config: name of a configuration, where the data set has several.
        split: the training split; null is `train`, or the only split. A part of a split, as in
            train[:10%], needs a name on the hub or a folder of files.
        held_out: fraction held out of the training split. null holds out the split `test`, else
            `validation`, else 0.1 of the training split.
        image_column: column of the pictures; null finds the only one.
        label_column: column of integers or words. null takes one named label, labels, class, cls or
            target, else the only column of class labels; without such a column, the pictures are
            unlabelled.
        context_column: column that has an embedding, or a list of embeddings, in each row. They
            take the place of the labels.
    """

    path: str
    config: str | None = None
    split: str | None = None
    held_out: Fraction | None = None
    image_column: str | None = None
    label_column: str | None = None
    context_column: str | None = None

    def load(self) -> ImageData:
        folder = Path(self.path).expanduser()
        place = name = self.path
        if folder.exists() or self.path.startswith((".", "~")):  # else perhaps a name on the hub
            place, name = str(folder.absolute()), folder.resolve().name
        tables = _load_splits(place, self.config, self.split, self.held_out)
        return self.data_of(
            f"hf:{name}", tables, self.image_column and [self.image_column], self.label_column,
            self.context_column, self.caption_column,
        )  # fmt: skip


def _load_splits(
    path: str, config: str | None, split: str | None, held_out: float | None
) -> list["datasets.Dataset"]:
    """Return the training split and, if there is one and `held_out` is None, the test split. For
    the arguments see `HuggingFace`."""
    import datasets

    saved = any(Path(path, name).exists() for name in ("dataset_dict.json", "state.json"))
    splits: Any = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, config)
    if isinstance(splits, datasets.Dataset):  # saved without splits
        splits = {str(splits.split or "train"): splits}
    split = split or (next(iter(splits)) if len(splits) == 1 else "train")
    if split in splits:
        train = splits[split]
    elif "[" in split and not saved:
        train = datasets.load_dataset(path, config, split=split)
    else:
        raise unknown_name("data.split", split, splits)
    tests = [name for name in TEST_SPLITS if name in splits and name != split.split("[")[0]]
    return [train, *(splits[name] for name in tests[:1] if held_out is None)]


@register("data", "webdataset")
@dataclass(frozen=True, kw_only=True)
class WebDataset(Pictures):
    """Pictures in tar shards, which `datasets` copies once into its cache.

    Args:
        path: a folder of .tar files, a single file, a pattern such as `train-{000..127}.tar` or
            `train-*.tar`, or a URL that fsspec opens. A sample has a picture, perhaps a label in a
            .cls file, and perhaps a caption in a .txt file or as a value in a .json file.
        num_classes: number of classes; 0 drops the labels. null counts the words among the labels;
            for integers, it is the largest label + 1.
        caption_column: `txt`, or a key of the .json file. null takes `txt` or, without .txt files,
            a key named caption, captions, text or prompt.
        context: suffix of the files with embeddings, such as `context.npy`; they take the place of
            the labels.
    """

    path: str
    context: str | None = None

    def load(self) -> ImageData:
        import datasets

        where = os.path.expanduser(self.path)
        files = [f"{where}/*.tar"] if os.path.isdir(where) else expand_braces(where)
        table = _read_shards(files, self.path)
        whole = [c for c in table.features if table.data.column(c).null_count < len(table)]
        table = table.select_columns(whole)
        pictures = [n for n, kind in table.features.items() if isinstance(kind, datasets.Image)]
        if "txt" in whole and self.caption_column in (None, "txt"):
            key = ""
        else:
            key = caption_key(table, self.caption_column)
        if "json" in whole and not key:
            table = table.remove_columns("json")
        return self.data_of(
            f"{Path(without_credentials(self.path)).name}:tar", [table], pictures,
            "cls" if "cls" in whole and self.context is None else None, self.context,
            "json" if key else None, key,
        )  # fmt: skip


def _read_shards(files: list[str], path: str) -> "datasets.Dataset":
    """Return the shards `files` as a table. It has a column for each suffix of pictures, even if
    the first five samples, from which `datasets` infers columns, lack it. Labels are texts. Error
    messages show `path`."""
    import datasets
    from datasets.exceptions import DatasetGenerationError
    from datasets.packaged_modules.webdataset.webdataset import WebDataset as Reader

    if is_url(files[0]):  # else the library streams the first samples, which fails with s3fs
        urls = datasets.data_files.DataFilesList.from_patterns(files)
        files = datasets.DownloadManager().download(list(map(str, urls)))
    given: Any = {"path": "webdataset", "data_files": files, "split": "train"}
    with mock.patch.dict(Reader.DECODERS, {"cls": label_text, "json": bytes.decode}):
        try:
            features = dict(datasets.load_dataset(**given, streaming=True).features)
        except ValueError:  # the first five samples differ
            features = {name: datasets.Value("string") for name in ("__key__", "__url__")}
        features |= {suffix[1:]: datasets.Image() for suffix in SUFFIXES}
        features |= dict.fromkeys(("cls", "txt", "json"), datasets.Value("string"))
        try:
            return datasets.load_dataset(**given, features=datasets.Features(features))
        except DatasetGenerationError as error:
            raise ValueError(f"data.path={path!r}: {error.__cause__ or error}") from error


# Columns ------------------------------------------------------------------------------------------


def _image_column(table: "datasets.Dataset") -> str:
    import datasets

    images = [name for name, kind in table.features.items() if isinstance(kind, datasets.Image)]
    if len(images) != 1:
        raise ValueError(
            f"{len(images)} of the columns {', '.join(table.features)} have pictures (the feature "
            "Image): set data.image_column."
        )
    return str(images[0])


def _read_labels(
    table: "datasets.Dataset",
    column: str | None,
    used: Mapping[str, str],
    num_classes: int | None,
    name: str,
) -> tuple[Tensor, tuple[str, ...]]:
    """Return labels int64 [N] and class names; without labels, zeros and (). `column` is the column
    of labels; None takes the one that `find_label_column` finds. For `used` and `name` see there,
    for `num_classes` see `Pictures`."""
    import datasets

    if column is None and num_classes != 0:
        column = find_label_column(table, name, used)
    if column is None and num_classes:
        raise ValueError(f"data.num_classes={num_classes}, but {name} has no labels.")
    if column is None or num_classes == 0:
        return torch.zeros(len(table), dtype=torch.int64), ()
    kind = table.features[column]  # raises for an unknown column
    labels, names = read_labels(table[column][:], f"{name}: the column {column!r}")
    if isinstance(kind, datasets.ClassLabel):
        names = tuple(map(nfc, kind.names))
    return labels, check_labels(labels, num_classes, names, name)


# Pictures -----------------------------------------------------------------------------------------


def _picture(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the picture in a row, {"bytes": …, "path": …}, from the first column that has one;
    None if no column has."""
    return next((cell for name, cell in row.items() if name != "context" and cell), None)


def _source(row: dict[str, Any]) -> Any:
    """Return the content of a row's picture or, if only its path is stored, the path; None if the
    row has no picture."""
    cell = _picture(row)
    return cell and (cell["bytes"] or cell["path"])


def _size_of(table: "datasets.Dataset", name: str) -> tuple[int, int]:
    """Return the size (H, W) of all pictures in a table, read from up to 64 evenly spaced ones.
    Pictures that cannot be opened are skipped here, and reported in training. Error messages call
    the data `name`.

    Raises:
        ValueError: none can be opened, or they differ in size.
    """
    sizes, reason = dict[tuple[int, int], int](), ""
    for row in evenly_spaced(len(table), _MEASURED):
        try:
            picture = open_picture(_source(table[row]))
            sizes.setdefault((picture.height, picture.width), row)
        except Exception as error:  # as in read_picture
            reason = str(error)
    if not sizes:
        raise ValueError(f"{name}: none of the sampled pictures can be opened: {reason}")
    if len(sizes) > 1:
        two = [f"number {row} is {high}x{wide}" for (high, wide), row in list(sizes.items())[:2]]
        raise ValueError(
            f"{name}: the pictures differ in size (height x width): {', '.join(two)}. Set "
            "data.image_size."
        )
    return next(iter(sizes))
