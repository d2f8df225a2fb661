"""Known files from the network: fetched once into a folder, checked by MD5, never unpickled.

torchvision's downloader does the transfer. A file is written beside and renamed once its checksum
is right, under a lock, so that several processes that start together fetch it once.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RemoteFile:
    """A file's name, where it is to be had, and its MD5 as its publishers give it."""

    name: str
    url: str
    md5: str


def cache_folder(name: str) -> Path:
    """Return where files of `name` are kept unless data.path says otherwise.

    It is `$TREAD_ZOO_CACHE/<name>`, or `~/.cache/tread_zoo/<name>` where that is not set.
    """
    root = os.environ.get("TREAD_ZOO_CACHE") or Path.home() / ".cache" / "tread_zoo"
    return Path(root) / name


def fetch(source: str, files: Sequence[RemoteFile], folder: Path, *, download: bool) -> None:
    """Make sure that `folder` has `files`, which `data.name=<source>` needs.

    Files that are there are left as they are, unchecked: their reader checks what it reads.

    Raises:
        ValueError: a file is missing and was not to be downloaded, or could not be; the text
            names the folder, the files and their addresses.
    """
    missing = _missing(files, folder)
    if not missing:
        return
    if not download:
        raise ValueError(
            f"data.path={str(folder)!r} lacks {_names(missing)} of data.name={source!r}, and "
            f"data.download=false. {_remedy(missing, folder)}"
        )
    try:
        from filelock import FileLock  # comes with torch

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".download.lock"):
            missing = _missing(files, folder)  # another process may have fetched them meanwhile
            for file in list(missing):
                _download(file, folder)
                missing.remove(file)
    except (OSError, RuntimeError) as error:  # the network's errors are OSErrors
        raise ValueError(
            f"data.name={source!r}: {_names(missing)} could not be downloaded into "
            f"{str(folder)!r} ({error}). {_remedy(missing, folder)}"
        ) from error


def _download(file: RemoteFile, folder: Path) -> None:
    """Fetch a file; under its name is then the whole file or nothing."""
    from torchvision.datasets.utils import download_url

    partial = folder / f".partial_{file.name}"
    try:
        download_url(file.url, folder, partial.name)
        found = hashlib.md5(partial.read_bytes(), usedforsecurity=False).hexdigest()
        if found != file.md5:
            raise OSError(f"{file.url} gave a file with MD5 {found}; it should be {file.md5}")
        os.replace(partial, folder / file.name)
    finally:
        partial.unlink(missing_ok=True)


def _missing(files: Sequence[RemoteFile], folder: Path) -> list[RemoteFile]:
    return [file for file in files if not (folder / file.name).is_file()]


def _names(files: Sequence[RemoteFile]) -> str:
    return ", ".join(file.name for file in files)


def _remedy(files: Sequence[RemoteFile], folder: Path) -> str:
    return (
        f"Where there is a network: data.download=true. Where there is none: fetch "
        f"{' '.join(file.url for file in files)} elsewhere, and put what you fetched into "
        f"{str(folder)!r}, or set data.path to a folder that has it."
    )
