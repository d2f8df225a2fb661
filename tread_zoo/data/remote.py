"""Shards from elsewhere (http, s3, gs, …), copied once to this machine through fsspec.

Random access is what lets a run resume in the middle of an epoch, and it needs local files. A copy
is written beside and renamed when its size is right, under a lock, so that several processes that
start together fetch each shard once; a second start fetches what is missing.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tread_zoo.data.download import cache_folder

logger = logging.getLogger(__name__)

CHUNK = 2**22  # bytes at a time
INSTALL = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}


def is_remote(path: str) -> bool:
    """Return whether a path names another machine's file."""
    return "://" in path


def fetch_shards(urls: Sequence[str], folder: Path | None = None) -> list[Path]:
    """Return the local copies of shards, in the same order.

    Args:
        urls: with a protocol that fsspec knows.
        folder: where the copies go; None is a folder of these urls' parents in the cache.

    Raises:
        ValueError: a shard cannot be fetched, or what its protocol needs is not installed; shards
            that came whole stay.
    """
    from filelock import FileLock  # comes with torch

    copies = [(folder or _folder_of(url)) / url.rpartition("/")[2] for url in urls]
    for number, (url, copy) in enumerate(zip(urls, copies, strict=True), start=1):
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(copy.with_name(f".{copy.name}.lock")):
                if not copy.exists():
                    logger.info("shards    %d of %d: %s to %s", number, len(urls), url, copy.parent)
                    _fetch(url, copy)
        except Exception as error:  # each protocol has errors of its own
            raise ValueError(
                f"data.path: the shard {url} could not be fetched ({error or type(error).__name__})"
                f".{_remedy(url, error)} What came whole stays in {str(copy.parent)!r}, and the "
                "same command goes on from there; or copy the shards there by hand."
            ) from error
    return copies


def _fetch(url: str, copy: Path) -> None:
    import fsspec

    partial = copy.with_name(f".partial_{copy.name}")
    system, place = fsspec.core.url_to_fs(url)
    expected: Any = system.size(place)
    try:
        with system.open(place, "rb") as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, CHUNK)
        if expected is not None and partial.stat().st_size != expected:
            raise OSError(f"{partial.stat().st_size} bytes came, of {expected}")
        os.replace(partial, copy)
    finally:
        partial.unlink(missing_ok=True)


def _folder_of(url: str) -> Path:
    """Return a folder of the cache for the shards beside `url`, named so that a person knows it."""
    parent = url.rpartition("/")[0]
    digest = hashlib.sha256(parent.encode()).hexdigest()[:8]
    return cache_folder("shards") / f"{parent.rpartition('/')[2]}_{digest}"


def _remedy(url: str, error: Exception) -> str:
    package = INSTALL.get(url.partition("://")[0])
    if isinstance(error, ImportError) and package:
        return f" Run `pip install {package}`."
    return ""
