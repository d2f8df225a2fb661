"""Tables in a bucket: their files are downloaded when first read, and the oldest are deleted.

`fsspec` reads s3://, gs://, hf:// and others, each with a library of its own. The files of a table
(`latents.py`), its parts, are downloaded whole into a folder that all processes of a machine share.
An epoch visits the parts in a random order, and mixes the images of `window` neighbours:

    key of an image = position of its part in a permutation + window u,    u uniform in [0, 1)

Images are visited by rising key. So few parts are needed at a time, and new ones are due one by
one. The order depends on (seed, epoch) alone, whatever the number of processes.
"""

import bisect
import hashlib
import io
import itertools
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from tread_zoo.data.files import atomic_file, cache_folder
from tread_zoo.data.loader import Unavailable


class BucketTable:
    """Rows of a table in a bucket.

    Args:
        url: folder of the table.
        cache: local folder for downloaded parts; None is the folder of all downloads.
        num_cached: number of parts that stay there; an epoch mixes the images of half as many at a
            time.

    Raises:
        Unavailable: it cannot be reached.
        ValueError: it was written before tables could be in a bucket.
    """

    def __init__(self, url: str, cache: str | None = None, num_cached: int = 16):
        self.where = url.rstrip("/")
        self.name = self.where.rpartition("/")[2]
        self.num_cached, self.window = num_cached, max(1, num_cached // 2)
        content = self._fetch("table.json")
        self.metadata: dict[str, Any] = json.loads(content)
        lengths: dict[str, int] = self.metadata.get("lengths", {})
        if "mean" in self.metadata and not lengths:
            raise ValueError(
                f"data.path={url!r} was written by an earlier version: run its tread-zoo encode "
                "again, which only adds labels.npy and the lengths of parts, and copy both files."
            )
        self.names, self.ends = list(lengths), list(itertools.accumulate(lengths.values()))
        # Another table of the same address has other files.
        root = cache_folder() if cache is None else Path(cache).expanduser()
        self.cache = root / hashlib.sha256(url.encode() + content).hexdigest()[:16]
        # Images are not compared, since each would bring its part.
        self.digest = hashlib.sha256(content).hexdigest()[:4]
        self._open: dict[int, Any] = {}  # by part, the most recently used last

    def __len__(self) -> int:
        return self.ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    @property
    def num_train(self) -> int:
        """Number of rows of the training parts, which come first."""
        return sum(self.metadata["lengths"][name] for name in self.metadata["parts"]["train"])

    def labels(self) -> Tensor:
        """Return the labels int64 [N]."""
        return torch.from_numpy(np.load(io.BytesIO(self._fetch("labels.npy"))))

    def cell(self, column: str, row: int) -> bytearray:
        """Return the bytes of a cell. Raises `Unavailable` if its part cannot be downloaded."""
        part = bisect.bisect_right(self.ends, row)
        table = self._open.pop(part, None)
        self._open[part] = table = self._read(part) if table is None else table
        while len(self._open) > self.window + 1:
            self._open.pop(next(iter(self._open)))
        first = self.ends[part - 1] if part else 0
        return bytearray(table.column(column)[row - first].as_buffer())

    def order(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return a permutation int64 [N] of `rows` [N] in which the rows of a part are close
        together."""
        parts = torch.bucketize(rows, torch.tensor(self.ends), right=True)
        used, indices = parts.unique(return_inverse=True)
        positions = torch.randperm(len(used), generator=generator).double()
        offsets = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        return (positions[indices] + self.window * offsets).argsort(stable=True)

    def _fetch(self, name: str) -> bytes:
        import fsspec

        try:
            with fsspec.open(f"{self.where}/{name}", "rb") as stream:
                content: bytes = stream.read()
        except Exception as error:  # each library has its own
            raise Unavailable(f"{self.where}/{name} cannot be read: {error}") from error
        return content

    def _read(self, part: int) -> Any:
        """Return the rows of a part, which is downloaded if it is not there."""
        file = self.cache / self.names[part]
        self.cache.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                self._download(file)
            os.utime(file)
            rows = read_part(file)
        for old in sorted(self.cache.glob("*.arrow"), key=_last_use)[: -self.num_cached]:
            with FileLock(f"{old}.lock"):
                old.unlink(missing_ok=True)
        return rows

    def _download(self, file: Path) -> None:
        import fsspec

        url = f"{self.where}/{file.name}"
        try:
            with atomic_file(file) as stream, fsspec.open(url, "rb") as source:
                shutil.copyfileobj(source, stream, 2**22)
        except Exception as error:
            raise Unavailable(f"{url} cannot be downloaded to {self.cache}: {error}") from error


def _last_use(file: Path) -> float:
    """Return when a part was last opened; infinity if another process has deleted it by now."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def read_part(file: Path) -> Any:
    """Return the memory-mapped rows of a part, a table of pyarrow. A deleted file stays mapped."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        return pyarrow.ipc.open_stream(source).read_all()


def is_url(path: str) -> bool:
    """Return whether `path` is in a bucket, as in s3://bucket/folder."""
    return "://" in path
