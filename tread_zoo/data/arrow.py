"""Tables that `encode.py` wrote: Arrow files of rows, in a folder or in a bucket.

Files in a folder are memory-mapped in place, and an epoch visits the images in random order.

Files in a bucket (s3://, gs://, hf:// and others) are read through `fsspec`, which needs a library
for each service. A file is downloaded whole when one of its images is first read, into a folder
that all processes of a machine share. If there are more than `num_cached` files in this folder, the
least recently used are deleted. So that few files are needed at a time, an epoch puts the files in
random order and mixes only images of neighbouring files, `window` of them:

    key of an image = position of its file in the order + window u,    u uniform in [0, 1)

Images are visited by rising key. The order depends on (seed, epoch) alone, whatever the number of
processes.
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


class ArrowTable:
    """The rows of a table that `encode.py` wrote, in a folder or a bucket.

    Args:
        path: the table's folder, or its address in a bucket.
        cache: local folder for downloaded files; None is `cache_folder()`.
        num_cached: number of downloaded files to keep; an epoch mixes the images of half as many at
            a time.

    Raises:
        OSError: the table cannot be read.
        ValueError: the table is not finished, or was written by an earlier version.
    """

    def __init__(self, path: str, cache: str | None = None, num_cached: int = 16):
        self.in_bucket = is_url(path)
        self.where = path.rstrip("/") if self.in_bucket else str(Path(path).expanduser())
        self.name = Path(self.where).name
        self.num_cached, self.window = num_cached, max(1, num_cached // 2)
        content = self._fetch("table.json")
        self.metadata: dict[str, Any] = json.loads(content)
        if "lengths" not in self.metadata:
            raise ValueError(
                f"data.path={path!r} is not finished, or from an earlier version: run the command "
                "again that encoded it. It keeps the files that are there."
            )
        lengths: dict[str, int] = self.metadata["lengths"]
        self.names, self.ends = list(lengths), list(itertools.accumulate(lengths.values()))
        self.num_train = sum(lengths[name] for name in self.metadata["parts"]["train"])
        self.folder, self.digest = Path(self.where), ""  # no digest: items are compared
        if self.in_bucket:
            # A new table at the same address gets a new folder.
            root = cache_folder() if cache is None else Path(cache).expanduser()
            self.folder = root / hashlib.sha256(path.encode() + content).hexdigest()[:16]
            # Images are not compared: each would download a file.
            self.digest = hashlib.sha256(content).hexdigest()[:4]
        self._open: dict[int, dict[str, Any]] = {}  # columns by file, the most recently used last

    def __len__(self) -> int:
        return self.ends[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}

    def labels(self) -> Tensor:
        """Return the labels int64 [N]."""
        return torch.from_numpy(np.load(io.BytesIO(self._fetch("labels.npy"))))

    def cell(self, column: str, row: int) -> bytearray:
        """Return the bytes in `column` of row `row`. Raises `Unavailable` if the row's file cannot
        be read (in a bucket: cannot be downloaded)."""
        number = bisect.bisect_right(self.ends, row)
        columns = self._open.pop(number, None)
        if columns is None:
            rows = self._rows(number)
            columns = dict(zip(rows.column_names, rows.columns, strict=True))
        self._open[number] = columns
        while self.in_bucket and len(self._open) > self.window + 1:
            self._open.pop(next(iter(self._open)))
        first = self.ends[number - 1] if number else 0
        return bytearray(columns[column][row - first].as_buffer())

    def order(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return the random order, int64 [N], in which an epoch visits the N items of a data set.
        Item i is row rows[i] of the table. If the table is in a bucket, items of the same file stay
        close together, as the module's docstring explains."""
        if not self.in_bucket:
            return torch.randperm(len(rows), generator=generator)
        files = torch.bucketize(rows, torch.tensor(self.ends), right=True)
        used, indices = files.unique(return_inverse=True)
        positions = torch.randperm(len(used), generator=generator).double()
        offsets = torch.rand(len(rows), generator=generator, dtype=torch.float64)
        return (positions[indices] + self.window * offsets).argsort(stable=True)

    def _fetch(self, name: str) -> bytes:
        """Return the content of the table's small file `name`, such as table.json."""
        if not self.in_bucket:
            return Path(self.where, name).read_bytes()
        import fsspec

        try:
            with fsspec.open(f"{self.where}/{name}", "rb") as stream:
                content: bytes = stream.read()
        except Exception as error:  # each library raises its own
            raise Unavailable(f"{self.where}/{name} cannot be read: {error}") from error
        return content

    def _rows(self, number: int) -> Any:
        """Return the rows of the table's file with index `number`. If the table is in a bucket, the
        file is downloaded first, unless the local folder has it."""
        file = self.folder / self.names[number]
        if not self.in_bucket:
            try:
                return read_rows(file)
            except (OSError, ValueError) as error:
                raise Unavailable(f"{file} cannot be read: {error}") from error
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if not file.exists():
                self._download(file)
            os.utime(file)
            rows = read_rows(file)
        for old in sorted(self.folder.glob("*.arrow"), key=_last_use)[: -self.num_cached]:
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
            raise Unavailable(f"{url} cannot be downloaded to {self.folder}: {error}") from error


def _last_use(file: Path) -> float:
    """Return the time when a file was last opened, or infinity if another process has just deleted
    the file."""
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def read_rows(file: Path) -> Any:
    """Return the rows of a file as a memory-mapped table of pyarrow, which stays readable after the
    file is deleted."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        return pyarrow.ipc.open_stream(source).read_all()


def is_url(path: str) -> bool:
    """Return whether `path` is in a bucket, as in s3://bucket/folder."""
    return "://" in path
