"""Atomic writing, checksums, numpy's archives, and paths fit for publication."""

import hashlib
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tread_zoo.credentials import without_credentials


def checksum(file: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cache_folder() -> Path:
    """Return the folder for downloaded data: `$TREAD_ZOO_CACHE`, or ~/.cache/tread_zoo."""
    return Path(os.environ.get("TREAD_ZOO_CACHE") or Path.home() / ".cache" / "tread_zoo")


def printable(text: str) -> str:
    """Return `text`, such as a file's name, with unprintable characters escaped: `a\\nb`."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def without_paths(value: Any) -> Any:
    """Return `value` without credentials, and with every absolute path cut to its last part.
    `value` is a text, or mappings and lists that contain texts."""
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_paths, value))
    if not isinstance(value, str):
        return value
    value = without_credentials(value)
    if os.path.isabs(value) and "\n" not in value:
        return Path(value).name
    pattern = r"""(?<![\w./])~?(?:/[^\s/'"`|,;()<>\[\]{}]+)+/?"""
    return re.sub(pattern, lambda match: Path(match[0]).name, value)


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern with ranges such as {000..127} stands for."""
    before, *rest = re.split(r"\{(\d+)\.\.(\d+)\}", pattern, maxsplit=1)
    if not rest:
        return [pattern]
    first, last, after = rest
    numbers = (f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))
    return [name for number in numbers for name in expand_braces(before + number + after)]


@contextmanager
def open_npz(path: Path, field: str) -> Iterator[Any]:
    """Yield the open archive of an .npz file, whose arrays are read at first use. Raises ValueError
    if the file is damaged or not an .npz file. The message begins with `field`, unless numpy takes
    the file for a pickle."""
    damaged = (zipfile.BadZipFile, zlib.error, EOFError)
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise EOFError(f"one array of {archive.dtype}")
        with archive:
            yield archive
    except damaged as error:
        raise ValueError(f"{field}={str(path)!r} is no whole .npz file: {error}.") from error


@contextmanager
def atomic_file(path: Path, *, alone: bool = True) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` at the end of the `with` block, so that `path` is
    written whole or not at all.

    alone: whether no other process writes `path` at the same time. If one may, each process has a
    temporary file of its own.
    """
    name = f".{path.name}.partial" if alone else f".{path.name}.{os.getpid()}.partial"
    partial = path.with_name(name)
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # a power cut could keep the name without the bytes
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, alone: bool = True) -> None:
    """Write a text file atomically, in UTF-8. What UTF-8 cannot encode, as in names of files, is
    escaped. For `alone` see `atomic_file`."""
    with atomic_file(path, alone=alone) as stream:
        stream.write(text.encode(errors="backslashreplace"))
