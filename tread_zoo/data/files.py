"""Files that are there whole or not at all, their checksums, and their names as others see them."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def checksum(file: Path) -> str:
    """Return the sha256 of a file, 64 hex digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def printable(text: str) -> str:
    """Return `text` with what does not print escaped, as in `a\\nb`: names of files may be any."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def without_paths(value: Any) -> Any:
    """Return a text, or plain values with texts in them, with absolute paths cut to their last
    part: they are of this machine."""
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(without_paths, value))
    if not isinstance(value, str):
        return value
    if os.path.isabs(value) and "\n" not in value:
        return Path(value).name
    pattern = r"""(?<![\w./])~?(?:/[^\s/'"`|,;()<>\[\]{}]+)+/?"""
    return re.sub(pattern, lambda match: Path(match[0]).name, value)


@contextmanager
def written_whole(path: Path, *, alone: bool = True) -> Iterator[BinaryIO]:
    """Open a file beside `path` to write to; bring it to the disk and rename it at the end.

    alone: no other process writes it at the same time, so that what a stop left is overwritten.
    """
    name = f".{path.name}.partial" if alone else f".{path.name}.{os.getpid()}.partial"
    partial = path.with_name(name)
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # or a power cut keeps the name without the bytes
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, alone: bool = True) -> None:
    """Write a file whole or not at all."""
    with written_whole(path, alone=alone) as stream:
        stream.write(text.encode())
