"""Tar shards as WebDataset lays them out, read by random access.

A sample is a run of members that share a key, the name up to the first dot of its last part:
`train/000123.jpg` and `train/000123.cls` are sample `train/000123`. An index says in which shard
and where each sample's bytes lie. It is built by reading the headers once and cached in one file,
so that opening a data set costs no more with more shards, and reading a sample opens one file at
most. Nothing is ever extracted: names of members are keys, whatever they look like.

A shard that is cut short or damaged in a header gives what is whole before that place. The rest is
lost: as many samples as are known of, or as the other shards have, are in the index without bytes.

Dimensions: N samples.
"""

import hashlib
import io
import logging
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tread_zoo.data.files import written_whole
from tread_zoo.data.remote import fetch_shards, is_remote

logger = logging.getLogger(__name__)

LABEL = "cls"
_BLOCK = tarfile.BLOCKSIZE
_MOST_OPEN = 4096  # files at a time and reader, however many the system allows
_INDEX_FORMAT = 1
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.xz", ".tar.bz2")


@dataclass(frozen=True)
class Damage:
    """What is wrong with a shard, in words, and how many bytes from its start may be whole."""

    reason: str
    whole_bytes: int = 0


@dataclass(frozen=True)
class ShardIndex:
    """Where each sample lies: int64 arrays [N], `shard` counting in `paths`; label -1: none.

    A sample that is lost has size -1; `damage` says what is wrong with its shard.
    """

    paths: tuple[str, ...]
    shard: np.ndarray
    offset: np.ndarray
    size: np.ndarray
    label: np.ndarray
    damage: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.shard)

    def warn(self) -> None:
        """Say which shards are damaged, and how many of their samples are lost."""
        for number, reason in self.damage.items():
            sizes = self.size[self.shard == number]
            logger.warning(
                "corrupt   the shard %r %s %d of its %d samples are lost",
                self.paths[number], reason, (sizes < 0).sum(), len(sizes),
            )  # fmt: skip


class ShardReader:
    """The bytes of samples. Files are opened when first read, in each process anew."""

    def __init__(self, index: ShardIndex):
        self.index = index
        self._files: OrderedDict[int, BinaryIO] = OrderedDict()
        self._process, self._most = os.getpid(), most_open()

    def __len__(self) -> int:
        return len(self.index)

    def __getstate__(self) -> dict[str, ShardIndex]:
        return {"index": self.index}

    def __setstate__(self, state: dict[str, ShardIndex]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def where(self, item: int) -> str:
        """Return in words where sample `item` lies, for messages."""
        if self.index.offset[item] < 0:
            return f"{self.index.paths[self.index.shard[item]]!r}, a lost sample"
        return f"{self.index.paths[self.index.shard[item]]!r} at byte {self.index.offset[item]}"

    def read(self, item: int) -> bytes:
        """Return the bytes of sample `item`.

        Raises:
            ValueError: the sample is lost, or the shard is gone or has become shorter.
        """
        shard, size = int(self.index.shard[item]), int(self.index.size[item])
        if size < 0:
            reason = self.index.damage[shard]
            raise ValueError(f"the shard {self.index.paths[shard]!r} {reason}")
        try:
            file = self._open(shard)
            file.seek(int(self.index.offset[item]))
            found = file.read(size)
        except OSError as error:
            raise ValueError(f"the shard {self.where(item)} cannot be read ({error}).") from error
        if len(found) < size:
            raise ValueError(
                f"the shard {self.where(item)} ends {size - len(found)} bytes too early; it was "
                "cut short after the run began. Copy it again."
            )
        return found

    def _open(self, shard: int) -> BinaryIO:
        if self._process != os.getpid():  # a forked worker shares its parent's file positions
            self._files, self._process = OrderedDict(), os.getpid()
        if shard in self._files:
            self._files.move_to_end(shard)
        else:
            if len(self._files) >= self._most:
                self._files.popitem(last=False)[1].close()
            self._files[shard] = open(self.index.paths[shard], "rb", buffering=0)  # noqa: SIM115
        return self._files[shard]


def most_open() -> int:
    """Return how many files a reader may hold open: an eighth of what the process may, for there
    are up to four readers, and other files."""
    try:
        import resource
    except ImportError:  # Windows
        return 128
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    allowed = _MOST_OPEN if soft == resource.RLIM_INFINITY else soft // 8
    return max(1, min(allowed, _MOST_OPEN))


def find_shards(path: str) -> list[Path]:
    """Return the tar files that `path` names: a folder's, one file, or a pattern's.

    A pattern has `*`, `?` or a range `{000..127}`, of which every number must be there. Addresses
    with a protocol (https, s3, gs) are fetched into this machine's cache first, each shard once.

    Raises:
        ValueError: there is none, one of a range is missing, or they are no plain tar files.
    """
    if path.startswith("pipe:"):
        raise ValueError(
            f"data.path={path!r}: a pipe has no random access, which is what lets a run resume in "
            "the middle of an epoch. Give the shards' addresses (https://, s3://) or their folder."
        )
    if is_remote(path):
        return fetch_shards(_addresses(path))
    root = Path(path).expanduser()
    if root.is_dir():
        shards = sorted(p for p in root.glob("*.tar") if not p.name.startswith("."))
        packed = sorted(p.name for p in root.iterdir() if p.name.endswith(_COMPRESSED))
        if not shards and packed:
            raise _compressed(root / packed[0])
    else:
        shards = [found for name in _expand_ranges(str(root)) for found in _expand_globs(name)]
    if not shards:
        raise ValueError(
            f"data.path={path!r} has no tar shards; set data.path to their folder, or to a "
            "pattern: \"data.path='shards/train-{000..127}.tar'\" or "
            "\"data.path='shards/train-*.tar'\"."
        )
    for shard in shards:
        if not shard.is_file():
            raise ValueError(f"data.path={path!r}: the shard {str(shard)!r} does not exist.")
        if shard.name.endswith(_COMPRESSED):
            raise _compressed(shard)
    return shards


def open_index(
    shards: Sequence[Path],
    payload: Sequence[str],
    stamp: str | None = None,
    *,
    counts: Sequence[int] | None = None,
    damage: Mapping[int, Damage] | None = None,
) -> ShardIndex:
    """Return the index of `shards`, from its cache beside the first one if that is still true.

    Args:
        shards: tar files.
        payload: suffixes, without their first dot, of the member to index; one of them a sample.
        stamp: what tells that the shards are those that were indexed; not given, it is made of
            their names, sizes and times of change.
        counts: samples of each, where they are known.
        damage: what is known to be wrong with shards, by number.

    Raises:
        ValueError: a shard's samples lack the payload, or none of all samples is whole.
    """
    name, known = f"index_{payload[0].replace('.', '_')}", damage or {}
    if stamp is None:
        names = hashlib.sha256(repr([p.name for p in shards]).encode()).hexdigest()
        name += f"_{names[:8]}"  # of these: a folder may hold several sets of shards
        facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in shards]
        stamp = hashlib.sha256(repr((facts, tuple(payload))).encode()).hexdigest()
    cache = shards[0].parent / f"{name}.npz"
    columns, reasons = _load_columns(cache, stamp), {n: one.reason for n, one in known.items()}
    if columns is None:
        if len(shards) > 1:
            logger.info("%-9s %d shards, once", "indexing", len(shards))
        scanned = [
            Scanned(np.zeros((0, 3), np.int64), known[number].reason)
            if number in known and not known[number].whole_bytes
            else scan_shard(shard, payload)
            for number, shard in enumerate(shards)
        ]
        reasons = {n: s.damage for n, s in enumerate(scanned) if s.damage is not None} | reasons
        columns = _joined(shards, scanned, counts)
        if not reasons:  # what is lost today may be there tomorrow
            save_columns(cache, stamp, columns)
    for number, one in known.items():
        ends = columns["offset"] + columns["size"]
        columns["size"][(columns["shard"] == number) & (ends > one.whole_bytes)] = -1
    if reasons and not (columns["size"] >= 0).any():
        number = min(reasons)
        raise ValueError(f"the shard {str(shards[number])!r} {reasons[number]}")
    return ShardIndex(tuple(str(shard) for shard in shards), **columns, damage=reasons)


def save_columns(cache: Path, stamp: str, columns: Mapping[str, np.ndarray]) -> None:
    """Write an index's arrays; a folder that cannot be written to is left without its cache."""
    facts = {"format": np.array(_INDEX_FORMAT), "stamp": np.array(stamp)}
    try:
        with written_whole(cache, alone=False) as stream:
            np.savez(stream, **{**columns, **facts})  # type: ignore[arg-type]
    except OSError as error:
        logger.warning("the index could not be kept in %s (%s); each start makes it", cache, error)


def _load_columns(cache: Path, stamp: str) -> dict[str, np.ndarray] | None:
    """Return the arrays of a cache that is whole and true, or None."""
    try:
        with np.load(cache, allow_pickle=False) as stored:
            if int(stored["format"]) != _INDEX_FORMAT or str(stored["stamp"]) != stamp:
                return None
            return {key: stored[key] for key in ("shard", "offset", "size", "label")}
    except Exception:  # what NumPy, zip and zlib raise of a damaged one: it is made anew
        return None


@dataclass(frozen=True)
class Scanned:
    """(offset, size, label) of the samples of one shard, [n, 3], and what ended it too early."""

    rows: np.ndarray
    damage: str | None = None


def scan_shard(path: Path, payload: Sequence[str]) -> Scanned:
    """Return the samples of one shard, up to where it is damaged.

    Raises:
        ValueError: a sample has no payload or several, or a label that is none.
    """
    rows: list[tuple[int, int, int]] = []
    damage = None
    try:
        with path.open("rb") as stream:
            for key, members in _samples(stream):
                present = [suffix for suffix in payload if suffix in members]
                if len(present) != 1:
                    what = "none" if not present else " and ".join(present)
                    raise ValueError(
                        f"sample {key!r} has {what} of .{', .'.join(payload)}, but it must have "
                        f"one. Its members: {', '.join(sorted(members))}"
                    )
                rows.append((*members[present[0]], _read_label(stream, key, members.get(LABEL))))
    except _DAMAGES as error:
        damage = f"cannot be indexed to its end: {error}. Copy it again."
    except ValueError as error:
        raise ValueError(f"the shard {str(path)!r} cannot be indexed: {error}.") from error
    return Scanned(np.array(rows, np.int64).reshape(-1, 3), damage)


def _joined(
    shards: Sequence[Path], scanned: Sequence[Scanned], counts: Sequence[int] | None
) -> dict[str, np.ndarray]:
    """Return the columns of an index, with a row for each sample that is lost."""
    whole = [len(one.rows) for one in scanned if one.damage is None]
    usual = int(np.median(whole)) if whole else max(len(one.rows) for one in scanned)
    labelled = any((one.rows[:, 2] >= 0).any() for one in scanned)
    tables = []
    for number, one in enumerate(scanned):
        found = len(one.rows)
        lost = counts[number] - found if counts is not None else max(usual - found, 1)
        if one.damage is None:
            if counts is not None and lost:
                raise ValueError(
                    f"the shard {str(shards[number])!r} has {found} samples, and {counts[number]} "
                    "in the manifest. Encode again."
                )
            lost = 0
        # A lost sample is never read: any class does for a set that has some.
        row = np.array([[-1, -1, 0 if labelled else -1]], np.int64)
        tables.append(np.concatenate([one.rows, row.repeat(max(lost, 0), axis=0)]))
    table = np.concatenate(tables)
    columns = {key: table[:, i].copy() for i, key in enumerate(("offset", "size", "label"))}
    return {**columns, "shard": np.repeat(np.arange(len(tables)), [len(one) for one in tables])}


class _TornError(Exception):
    """A shard that ends too early, or has bytes where a header should be."""


_DAMAGES = (_TornError, tarfile.TarError, EOFError, OSError)


def _samples(stream: BinaryIO) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """Yield (key, span by suffix) of each sample, in order.

    Before a damaged place, the last sample is whole if it has the members that the first one has.
    """
    key, members, usual = "", dict[str, tuple[int, int]](), None
    try:
        for found, suffix, offset, size in _members(stream):
            if members and found != key:
                yield key, members
                usual, members = usual or members.keys(), {}
            if suffix in members:
                raise ValueError(f"sample {key!r} has two members .{suffix}; keys must differ")
            key, members[suffix] = found, (offset, size)
    except _DAMAGES:
        if members and members.keys() == usual:
            yield key, members
        raise
    if members:
        yield key, members


def _members(stream: BinaryIO) -> Iterator[tuple[str, str, int, int]]:
    """Yield (key, suffix, offset, size) of the plain files in a tar, reading headers alone."""
    length = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if length == 0:
        raise _TornError("it is empty")
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        while (member := tar.next()) is not None:
            tar.members = []  # type: ignore[attr-defined]  # tarfile would keep them all
            folder, _, name = member.name.rpartition("/")
            if not member.isreg() or name.startswith((".", "__")):
                continue
            if member.sparse is not None:
                raise ValueError(f"the member {member.name!r} is sparse; write it as a plain file")
            if member.offset_data + member.size > length:
                raise _TornError(f"it ends in the middle of the member {member.name!r}")
            stem, _, suffix = name.partition(".")
            yield f"{folder}/{stem}".lstrip("/"), suffix.lower(), member.offset_data, member.size
        # tarfile takes a header that it cannot read, or a missing one, for the end.
        stream.seek(tar.offset)
        if stream.read(_BLOCK) != bytes(_BLOCK):
            raise _TornError(
                f"byte {tar.offset} is neither a readable header nor the end mark of an archive"
            )


def _read_label(stream: BinaryIO, key: str, span: tuple[int, int] | None) -> int:
    """Return the class in a .cls member, or -1 where there is none; keeps the file's position."""
    if span is None:
        return -1
    place = stream.tell()
    stream.seek(span[0])
    text = stream.read(min(span[1], 32))
    stream.seek(place)
    if not re.fullmatch(rb"\s*\d{1,9}\s*", text):
        raise ValueError(f"sample {key!r} has .{LABEL} {text!r}; it must be a whole number >= 0")
    return int(text)


def _expand_ranges(pattern: str) -> list[str]:
    """Return `a{08..10}b` as a08b, a09b, a10b; what has no range, as it is."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", pattern)
    if found is None:
        return [pattern]
    first, last = found.groups()
    numbers = [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [name for number in numbers for name in _expand_ranges(f"{head}{number}{tail}")]


def _addresses(path: str) -> list[str]:
    """Return the addresses of remote shards that `path` names, one or a range of them."""
    urls = _expand_ranges(path)
    for url in urls:
        if url.endswith(_COMPRESSED):
            raise _compressed(url)
        if not url.endswith(".tar") or re.search(r"[*?\[]", url):
            raise ValueError(
                f"data.path={path!r}: shards from elsewhere are named one by one, as in "
                "\"data.path='https://host/set/train-{000..127}.tar'\"."
            )
    return urls


def _expand_globs(name: str) -> list[Path]:
    path = Path(name)
    return sorted(path.parent.glob(path.name)) if re.search(r"[*?\[]", path.name) else [path]


def _compressed(shard: Path | str) -> ValueError:
    return ValueError(
        f"the shard {str(shard)!r} is compressed, and has no random access; unpack it (gunzip, "
        "unzstd) to a plain .tar. Pictures hardly shrink."
    )


@dataclass(frozen=True)
class WrittenShard:
    """A shard on the disk: its length in bytes, its sha256, and the spans [n] of its payload."""

    num_bytes: int
    sha256: str
    offset: np.ndarray
    size: np.ndarray


def write_shard(
    path: Path, samples: Iterable[tuple[str, Mapping[str, bytes]]], payload: str
) -> WrittenShard:
    """Write samples (key, bytes by suffix) as a tar, beside and renamed: it is there whole or not.

    The bytes are a function of the samples alone. `payload` is the suffix whose spans are returned.
    """
    partial = path.with_name(f".{path.name}.partial")  # one writer a shard
    offsets, sizes = [], []
    with partial.open("wb") as stream:
        hashing = _Hashing(stream)
        with tarfile.open(
            fileobj=hashing,  # type: ignore[call-overload]
            mode="w:",
            format=tarfile.USTAR_FORMAT,
        ) as tar:
            for key, members in samples:
                for suffix, content in members.items():
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
                    tar.members = []
                    if suffix == payload:
                        offsets.append(tar.offset - -(-len(content) // _BLOCK) * _BLOCK)
                        sizes.append(len(content))
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    return WrittenShard(
        hashing.length,
        hashing.digest.hexdigest(),
        np.array(offsets, np.int64),
        np.array(sizes, np.int64),
    )


class _Hashing:
    """A file to write to that keeps the sha256 of what was written."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.digest, self.length = stream, hashlib.sha256(), 0

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        self.length += len(content)
        return self.stream.write(content)

    def tell(self) -> int:
        return self.length
