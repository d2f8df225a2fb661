"""Latents in an LMDB, as MaskDiT's `extract_latent.py` writes them.

    z-{i}    float32 [8,h,h] as raw bytes: mean, then logvar, unscaled
    y-{i}    the label, in decimal digits
    length   the number of items, in decimal digits; written last

That it is the logvar is told by how MaskDiT draws, z = 0.18215 (mean + exp(logvar / 2) noise) with
logvar held to [-30, 20]. Extracted with the mirrored images (`--xflip`), there are N = length / 2
images, and item N + i is the mirrored image i. Nothing in the file says so, hence it is measured:
`_second_half_is_mirrored`.

LMDB maps its file into memory, and a file that is cut short kills the process that reads past its
end (SIGBUS). So the length is checked when it is opened. An environment may be opened once in a
process and not be used after a fork: those who read one folder share it (`_share`).

Dimensions: N images, K copies (as it is, mirrored), h height and width.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from tread_zoo.data.latents.codec import split_moments
from tread_zoo.data.latents.formats import Stored

FILE = "data.mdb"
_CHANNELS = 8  # mean and logvar of the 4 channels of Stable Diffusion's autoencoder
_CONTENT = "mean_logvar"
_PAIRS = 16  # that are compared
# Correlation of a mirrored latent with the latent of the mirrored image, median of 16: with TAESD
# on photographs of 64x64 pixels 0.43 to 0.68, and of two photographs -0.14 to 0.19.
_ALIKE = 0.3


def read_lmdb(path: Path) -> Stored:
    """Return the latents of the LMDB in `path`, or in its sub-folder `train`.

    Labels are -1 where the file has none at all.

    Raises:
        ValueError: lmdb is not installed, or the file is damaged, cut short or holds other things.
    """
    folder = path if (path / FILE).exists() else path / "train"
    if not (folder / FILE).exists():
        raise ValueError(f"data.path={str(path)!r} has neither {FILE} nor train/{FILE}.")
    opened = _share(str(folder.resolve()))
    length = _read_length(opened)
    if not length:
        raise ValueError(f"{opened.file!r} has no latents: its 'length' is 0.")
    labels = _read_labels(opened, length)
    items = LmdbItems(opened.folder, length, _first_size(opened))
    if _second_half_is_mirrored(items, labels):
        length //= 2
        items = LmdbItems(items.folder, length, items.size, flips=True)
    return Stored(items, labels[:length], _CONTENT)


class LmdbItems:
    """Moments [K,8,h,h] by number. The environment is opened when first read, in each process anew.

    folder: an absolute path. length: N. size: h. flips: item N + i is the mirrored image i.
    """

    def __init__(self, folder: str, length: int, size: int, flips: bool = False):
        self.folder, self.length, self.size, self.flips = folder, length, size, flips
        self._opened: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_opened": None}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> Tensor:
        """Return one. Raises ValueError naming the key that is missing or of another size."""
        if self._opened is None or self._opened.process != os.getpid():
            self._opened = _share(self.folder)
        content = bytearray()
        for number in (item, item + self.length) if self.flips else (item,):
            key = f"z-{number}"
            value = self._opened.get(key)
            if len(value) != 4 * _CHANNELS * self.size**2:
                raise ValueError(
                    f"{self._opened.file!r}: the key {key!r} holds {len(value)} bytes, and 'z-0' "
                    f"{4 * _CHANNELS * self.size**2}, float32 [{_CHANNELS},{self.size},"
                    f"{self.size}]; all must be alike. Copy or extract the file again."
                )
            content += value
        return torch.frombuffer(content, dtype=torch.float32).view(
            -1, _CHANNELS, self.size, self.size
        )


class _Opened:
    """The environment of a folder in one process: read only, without a lock file."""

    def __init__(self, folder: str):
        self.folder, self.process = folder, os.getpid()
        self.file = str(Path(folder, FILE))
        lmdb = _import_lmdb()
        try:
            self.environment: Any = lmdb.open(
                folder, readonly=True, create=False, lock=False, readahead=False
            )
        except lmdb.Error as error:
            raise ValueError(f"{self.file!r} cannot be opened as an LMDB ({error}).") from error
        pages = self.environment.info()["last_pgno"] + 1
        wanted, found = pages * self.environment.stat()["psize"], os.path.getsize(self.file)
        if found < wanted:
            self.environment.close()
            raise ValueError(
                f"{self.file!r} has {found} bytes of {wanted}: it is cut short. Copy it again."
            )

    def get(self, key: str) -> bytes:
        """Return a value. Raises ValueError where there is none."""
        with self._told_of_damage(key), self.environment.begin() as transaction:
            value = transaction.get(key.encode())
        if value is None:
            raise ValueError(
                f"{self.file!r} has no key {key!r}: it was not written to its end, or holds "
                "something else than latents ('z-0', 'y-0', …, 'length'). Copy or extract it again."
            )
        return value

    def starting_with(self, start: str) -> Iterator[tuple[str, bytes]]:
        """Give (key, value) of all keys that start so, in the order in which they lie."""
        with self._told_of_damage(start), self.environment.begin() as transaction:
            cursor = transaction.cursor()
            cursor.set_range(start.encode())
            for key, value in cursor:
                if not key.startswith(start.encode()):
                    break
                yield key.decode("ascii", "replace"), value

    @contextmanager
    def _told_of_damage(self, key: str) -> Iterator[None]:
        try:
            yield
        except _import_lmdb().Error as error:
            raise ValueError(
                f"{self.file!r}: the key {key!r} cannot be read ({error}). Copy the file again."
            ) from error


_shared: "WeakValueDictionary[str, _Opened]" = WeakValueDictionary()


def _share(folder: str) -> _Opened:
    """Return the environment of a folder that all readers in this process share."""
    found = _shared.get(folder)
    if found is not None and found.process != os.getpid():
        found.environment.close()  # this process's copy of what its parent opened
        found = None
    if found is None:
        found = _Opened(folder)
        _shared[folder] = found
    return found


def _import_lmdb() -> Any:
    try:
        import lmdb
    except ImportError as error:
        raise ValueError(
            'data.format=lmdb needs the lmdb library: run `pip install "tread-zoo[lmdb]"` (or '
            "`pip install lmdb`)."
        ) from error
    return lmdb


def _read_length(opened: _Opened) -> int:
    return _whole_number(opened, "length", opened.get("length"))


def _read_labels(opened: _Opened, length: int) -> np.ndarray:
    """Return int64 [length]; the keys y-{i} lie side by side, so they are read in their order."""
    labels = np.full(length, -1, np.int64)
    for key, value in opened.starting_with("y-"):
        if key[2:].isdigit() and int(key[2:]) < length:
            labels[int(key[2:])] = _whole_number(opened, key, value)
    bare = np.flatnonzero(labels < 0)
    if 0 < len(bare) < length:
        raise ValueError(
            f"{opened.file!r} has no key 'y-{bare[0]}' nor {len(bare) - 1} others of the "
            f"{length} labels: it was not written to its end. Copy or extract it again."
        )
    return labels


def _whole_number(opened: _Opened, key: str, value: bytes) -> int:
    if not value.isdigit():
        raise ValueError(
            f"{opened.file!r}: the key {key!r} holds {value[:20]!r}; it must be a whole number "
            "from 0 on, in decimal digits."
        )
    return int(value)


def _first_size(opened: _Opened) -> int:
    """Return h, of the first item."""
    num_bytes = len(opened.get("z-0"))
    size = math.isqrt(num_bytes // (4 * _CHANNELS))
    # Nothing else comes near: [4,h,h] in float32, [8,h,h] in float16 would need an h of k/sqrt(2).
    if not size or 4 * _CHANNELS * size**2 != num_bytes:
        raise ValueError(
            f"{opened.file!r}: the key 'z-0' holds {num_bytes} bytes; moments, float32 "
            f"[{_CHANNELS},h,h], are {4 * _CHANNELS} h h bytes (32768 for 32x32). Encode the "
            "images with scripts/encode_latents.py, or write the latents as an .npz."
        )
    return size


def _second_half_is_mirrored(items: LmdbItems, labels: np.ndarray) -> bool:
    """Return whether item N + i is the mirrored image i, N half the number of items.

    If so, both halves have the same labels, and the means, without those of their channels,
    correlate once one of them is mirrored: of an image and its mirrored copy nearly 1, of two
    images around 0. The median of up to `_PAIRS` evenly spaced pairs tells.
    """
    half = len(items) // 2
    if len(items) % 2 or not np.array_equal(labels[:half], labels[half:]):
        return False
    found = []
    count = min(half, _PAIRS)
    for number in (index * half // count for index in range(count)):
        try:
            pair = torch.cat([items[number].flip(-1), items[half + number]])
        except ValueError:  # told of when it is trained on
            continue
        mean = split_moments(pair, _CONTENT)[0].double()
        one, other = (mean - mean.mean((-2, -1), keepdim=True)).flatten(1)
        found.append(float(torch.cosine_similarity(one, other, dim=0)))
    return bool(found) and float(np.median(found)) > _ALIKE
