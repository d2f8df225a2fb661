"""Find the picture files under a folder, by the same rules for training, scoring and references."""

import csv
import functools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tread_zoo.data.files import printable
from tread_zoo.data.labels import nfc

logger = logging.getLogger(__name__)

SUFFIXES = (
    ".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff",
)  # fmt: skip
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "GIF", "TIFF")  # Pillow's names for these
METADATA = ("metadata.csv", "metadata.jsonl", "dataset.json")  # the first existing file is read
PARTS = {"train", "training", "val", "valid", "validation", "test", "testing"}  # not classes


def picture_files(root: Path, field: str, beside: str | None = None) -> list[Path]:
    """Return the picture files under `root`, known by their suffix, in no particular order.

    Hidden files and folders are skipped. A folder that can also be reached through links counts
    once, under its own name. The log says how many files of other kinds there are; it does not
    count metadata, .txt files (which may be captions) or files with the suffix `beside`.

    Args:
        root: the folder.
        field: name of the setting that gives the folder, for errors.
        beside: suffix of files that belong to pictures, such as contexts.

    Raises:
        ValueError: there are no pictures, or a name is not UTF-8.
    """
    files, others = list[Path](), Counter[str]()
    for entry in _entries(root):
        if not entry.is_file():  # a pipe, a device, a link to nothing
            others["no regular file"] += 1
        elif entry.name.lower().endswith(SUFFIXES):
            files.append(Path(entry.path))
        elif not entry.name.endswith((beside or ".txt", ".txt", *METADATA)):
            others[os.path.splitext(entry.name)[1].lower() or "no suffix"] += 1
    if others:
        kinds = ", ".join(f"{count} {printable(kind)}" for kind, count in others.most_common())
        if {".heic", ".heif"} & others.keys():
            kinds += " (save HEIC pictures as JPEG first)"
        logger.warning("ignored   %s: files that are no pictures: %s", root, kinds)
    if not files:
        raise ValueError(f"{field}={str(root)!r} has no pictures ({', '.join(SUFFIXES)}).")
    for name in map(str, files):
        if not name.isascii() and any("\ud800" <= char <= "\udfff" for char in name):
            raise ValueError(f"{field}: the name {printable(name)} is not UTF-8: rename it.")
    return files


@functools.cache
def picture_formats() -> tuple[str, ...]:
    """Return the formats that pictures may have, by Pillow's names. Without this list, Pillow would
    go by a file's content alone, and start Ghostscript for a file that begins as PostScript."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # an older Pillow lacks AVIF


def _entries(root: Path) -> Iterator["os.DirEntry[str]"]:
    """Yield all files under `root`. Links to folders are followed last, so each folder is found
    under its own name."""
    seen, places, links, repeated = set[tuple[int, int]](), [os.fspath(root)], list[str](), 0
    while places or links:
        place = places.pop() if places else links.pop(0)
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            repeated += 1
            continue
        seen.add((status.st_dev, status.st_ino))
        with os.scandir(place) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    (links if entry.is_symlink() else places).append(entry.path)
                else:
                    yield entry
    if repeated:
        logger.warning("ignored   %s: %d links to folders that are read already", root, repeated)


def find_classes(
    root: Path, beside: str | None, *, labelled: bool
) -> tuple[list[str], list[int], list[str]]:
    """Return the sorted picture files under `root`, the label of each file, and the class names.

    The sub-folders are the classes; names with the same NFC form (see `nfc`) are one class. Without
    sub-folders, all labels are 0 and there are no class names.

    Args:
        root: the folder.
        beside: see `picture_files`.
        labelled: whether training uses these labels.

    Raises:
        ValueError: pictures lie beside sub-folders; or, if `labelled`, the sub-folders have names
            of parts, such as train and val, and not of classes.
    """
    folders = [e for e in os.scandir(root) if e.is_dir() and not e.name.startswith(".")]
    files = sorted(
        (os.path.relpath(file.parent, root).split(os.sep)[0], str(file))
        for file in picture_files(root, "data.path", beside)
    )
    found = {name for name, _ in files}
    names = sorted({nfc(e.name) for e in folders if not e.is_symlink() or e.name in found})
    loose = [os.path.basename(path) for name, path in files if name == "."]
    if names and loose:
        raise ValueError(
            f"data.path={str(root)!r} has pictures beside sub-folders ({loose[0]!r} beside "
            f"{names[0]!r}): move all into sub-folders, which are the classes, or none."
        )
    if labelled and names and {name.lower() for name in names} <= PARTS:
        raise ValueError(
            f"data.path={str(root)!r} has the sub-folders {', '.join(names)}, which are parts and "
            f"no classes: set data.path={os.path.join(root, names[0])}, or data=hf to train on one "
            "and hold out the other."
        )
    labels = {name: label for label, name in enumerate(names)}
    return [path for _, path in files], [labels.get(nfc(name), 0) for name, _ in files], names


def folder_rows(root: Path) -> dict[str, dict[str, Any]]:
    """Return a folder's metadata: for each file's path within the folder, a row that maps columns
    to values. Without metadata, return {}.

    The metadata are metadata.csv or metadata.jsonl with the column file_name, as in `datasets`, or
    EDM's dataset.json, whose labels become the column `label`.

    Raises:
        ValueError: the metadata cannot be read.
    """
    file = next((root / name for name in METADATA if (root / name).is_file()), None)
    if file is None:
        return {}
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            if file.suffix == ".csv":
                rows: list[dict[str, Any]] = list(csv.DictReader(stream))
            elif file.suffix == ".jsonl":
                rows = [json.loads(line) for line in stream if line.strip()]
            else:
                pairs = json.load(stream).get("labels") or ()
                rows = [{"file_name": name, "label": label} for name, label in pairs]
        return {nfc(os.path.normpath(row.pop("file_name"))): row for row in rows}
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise ValueError(
            f"{file} cannot be read ({type(error).__name__}: {error}): it needs a row for each "
            "picture, whose path is file_name."
        ) from error


def columns_of(rows: dict[str, dict[str, Any]], root: Path, files: list[str]) -> dict[str, Any]:
    """Return the metadata `rows`, from `folder_rows(root)`, as columns: for each name, a list with
    a value for each of `files`. A file without a row gets None.

    Raises:
        ValueError: there are rows, but none of `files` has one.
    """
    places = [nfc(os.path.relpath(file, root)) for file in files]
    if rows and not any(place in rows for place in places):
        raise ValueError(
            f"data.path={str(root)!r}: none of the pictures, such as {places[0]!r}, is a file_name "
            f"of its metadata, such as {next(iter(rows))!r}."
        )
    names = dict.fromkeys(name for row in rows.values() for name in row if name)
    return {name: [rows.get(place, {}).get(name) for place in places] for name in names}
