"""The images of each step, in batches; corrupt items are replaced.

The order depends on (seed, epoch) alone. An item is corrupt if reading it raises `ValueError` or
`OSError`. It is replaced by the first readable item of a sequence that depends on (seed, index)
alone:

    index -> draw(seed, index, 0), draw(seed, index, 1), …

So a batch is the same in a resumed run and in any worker.

B batch, C channels, H height, W width. Contexts, T embeddings of width S, float [T, S], may take
the place of labels. Features [K, S, h, w], K copies of S channels, may be a third element of items.
"""

import functools
import logging
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from tread_zoo.credentials import without_credentials
from tread_zoo.data.files import printable
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

MAX_TRIES = 16  # per item; if all fail, the disk is assumed to be missing


class StepBatches:
    """A torch batch sampler: the indices of items for the steps start_step … num_steps - 1.

    Epoch e is a permutation drawn from (seed, e) alone, cut into global batches of
    batch_size * num_ranks; rank r takes the r-th slice of each. Items that do not fill a global
    batch are dropped, different ones in each epoch. Global batches of one size are the same on any
    number of ranks, and in a resumed run. Raises ValueError if there are fewer items than a global
    batch.

    `items` is the data set or its length. Its method `epoch_order`, if any, makes the permutations.
    """

    def __init__(
        self,
        items: Any,
        batch_size: int,
        *,
        seed: int,
        num_steps: int,
        rank: int = 0,
        num_ranks: int = 1,
        start_step: int = 0,
    ):
        num_items = items if isinstance(items, int) else len(items)
        global_batch = batch_size * num_ranks
        if num_items < global_batch:
            raise ValueError(
                f"batch_size={batch_size} on {num_ranks} rank(s) needs {global_batch} images per "
                f"step, but the training part has {num_items}."
            )
        self.num_items, self.batch_size, self.seed = num_items, batch_size, seed
        self.num_steps, self.start_step = num_steps, start_step
        self.rank, self.num_ranks = rank, num_ranks
        self.order = getattr(items, "epoch_order", None)
        self.steps_per_epoch = num_items // global_batch

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for step in range(self.start_step, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                generator = make_generator("data", self.seed, epoch)
                if self.order is None:
                    order = torch.randperm(self.num_items, generator=generator)
                else:
                    order = self.order(generator)
            place = step % self.steps_per_epoch * self.num_ranks + self.rank
            yield order[place * self.batch_size : (place + 1) * self.batch_size].tolist()


# Corrupt items ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorruptItem:
    """An item that cannot be read: its index, its name for logs, and the reason."""

    index: int
    name: str
    reason: str

    @property
    def line(self) -> str:
        """The item's line in corrupt.txt: index, name and reason."""
        reason = " ".join(self.reason.split())
        line = "\t".join((str(self.index), printable(self.name), printable(reason))) + "\n"
        return str(without_credentials(line))


class Unavailable(OSError):
    """Raised if data cannot be reached for now. The run ends; no other items replace these data."""


def read_item(dataset: Dataset[Any], index: int) -> tuple[Any, ...] | CorruptItem:
    """Return item `index` of a data set, or a `CorruptItem` if it cannot be read."""
    try:
        item: tuple[Any, ...] = dataset[index]
    except Unavailable:
        raise
    except (ValueError, OSError) as error:
        name_of = getattr(dataset, "item_name", "item {}".format)
        return CorruptItem(index, name_of(index), str(error) or type(error).__name__)
    return item


def warn_about(item: CorruptItem) -> None:
    """Log a warning that an item cannot be read."""
    logger.warning("corrupt   %s cannot be read: %s", printable(item.name), printable(item.reason))


class CorruptLog:
    """The list of the items that cannot be read in the data sets `parts`. Too many of them end the
    run.

    Each process appends its corrupt items to `file`, a tab-separated line per item, and counts the
    distinct items in it, so no process waits for another. Items in an existing `file` that can be
    read now do not count. `max_share` is the fraction of all items that may be corrupt, rounded up;
    `field` is the name of that setting, for errors.
    """

    def __init__(
        self,
        file: Path,
        parts: Iterable[Any],
        max_share: float,
        field: str = "training.max_corrupt_share",
    ):
        self.file, self.num_items, self.max_share, self.field = file, 0, max_share, field
        self.parts, self.mended = list(parts), set[str]()
        for part in self.parts:
            with suppress(AttributeError):  # a list takes no attribute; it cannot be corrupt
                part.on_corrupt = self
            self.num_items += len(part)
        self.mended = {item for item in self.items if self._can_be_read(item)}

    @property
    def items(self) -> set[str]:
        """The corrupt items of all processes so far, each as one text: index, tab, name."""
        text = self.file.read_text(encoding="utf-8", errors="replace") if self.file.exists() else ""
        lines = {line.rpartition("\t")[0] for line in text.split("\n") if line.count("\t") == 2}
        return lines - self.mended

    def _can_be_read(self, item: str) -> bool:
        """Return whether an item of the list is in a data set and can be read."""
        index, name = int(item.partition("\t")[0]), item.partition("\t")[2]
        for part in self.parts:
            name_of = getattr(part, "item_name", "item {}".format)
            if index < len(part) and printable(name_of(index)) == name:
                return not isinstance(read_item(part, index), CorruptItem)
        return False

    def __call__(self, item: CorruptItem) -> None:
        """Add an item to the list, if it is new. Raises ValueError if there are now too many."""
        items, name = self.items, item.line.rpartition("\t")[0]
        if name not in items:
            warn_about(item)
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(item.line)
            items.add(name)
        if len(items) > math.ceil(self.max_share * self.num_items):
            raise ValueError(
                f"{len(items)} of {self.num_items} images cannot be read, more than "
                f"{self.field}={self.max_share:g} allows: {self.file} lists them. Replace the "
                f"files or raise {self.field}, and continue."
            )


# Batches ------------------------------------------------------------------------------------------


def make_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[int]],
    num_workers: int = 0,
    *,
    seed: int = 0,
) -> Iterator[tuple[Tensor, ...]]:
    """Return an iterator over batches of a data set: images [B,C,H,W], labels int64 [B] (or
    contexts), and features if the items have them.

    Images in memory (a data set with `gather`) are indexed directly. Others are read by worker
    processes, each of which reads two batches ahead. The workers start with the first batch, live
    as long as the iterator, and draw nothing from the global generators.

    Args:
        dataset: the data set. Its attribute `on_corrupt`, a function, is called in this process
            once for each corrupt item; without it, a warning is logged.
        batches: the indices of the items of each batch.
        num_workers: number of worker processes; 0 reads in this process.
        seed: determines, with the index of a corrupt item, which item replaces it.

    Raises:
        ValueError: while iterating: an item and all its replacements are corrupt.
        Unavailable: while iterating: the data cannot be reached for now.
    """
    gather = getattr(dataset, "gather", None)
    if gather is not None:
        return (gather(torch.tensor(indices, dtype=torch.int64)) for indices in batches)
    return _read_batches(dataset, batches, num_workers, seed)


def prefetch_to_device(
    batches: Iterator[tuple[Tensor, ...]], device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    """Yield the batches. If `device` is a CUDA GPU, each batch is copied to it while it still
    computes on the batch before."""
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(copies):
            copied = tuple(t.pin_memory().to(device, non_blocking=True) for t in batch)
        current = torch.cuda.current_stream(device)
        current.wait_stream(copies)
        for tensor in copied:
            tensor.record_stream(current)
        yield copied


def read_items(dataset: Dataset[Any], indices: Sequence[int]) -> tuple[Tensor, ...]:
    """Return (images [B,…], labels int64 [B]) of the items `indices`, read in this process. Corrupt
    items are replaced as in `make_loader`."""
    return next(_read_batches(dataset, [list(indices)], 0, 0))


def _read_batches(
    dataset: Dataset[Any], batches: Iterable[list[int]], num_workers: int, seed: int
) -> Iterator[tuple[Tensor, ...]]:
    loader: Any = DataLoader(
        range(len(dataset)),  # type: ignore[arg-type]
        batch_sampler=batches,
        num_workers=num_workers,
        collate_fn=functools.partial(_read_batch, dataset, seed),
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_run,
        # Without it, DataLoader takes its workers' seed from the global generator.
        generator=make_generator("workers"),
    )
    on_corrupt: Callable[[CorruptItem], None] = getattr(dataset, "on_corrupt", warn_about)
    reported: set[int] = set()
    for tensors, corrupt, unavailable in loader:
        if unavailable:
            raise Unavailable(unavailable)
        for item in corrupt:
            if item.index not in reported:
                reported.add(item.index)
                on_corrupt(item)
        if tensors is None:
            raise ValueError(
                f"{MAX_TRIES} items in a row cannot be read, such as {corrupt[-1].name} "
                f"({corrupt[-1].reason}). Check that the disk is mounted and the folder exists."
            )
        yield tensors


def _read_batch(
    dataset: Dataset[Any], seed: int, indices: Sequence[int]
) -> tuple[tuple[Tensor, ...] | None, list[CorruptItem], str]:
    """Return the batch (images [B,…], labels int64 [B], …) of the items `indices`, the corrupt
    items, and why the data set is unavailable, or "". The batch is None if the data set is
    unavailable, or if an item and all its replacements, which depend on `seed`, are corrupt."""
    corrupt: list[CorruptItem] = []
    try:
        items = [_read_or_replace(dataset, seed, index, corrupt) for index in indices]
    except Unavailable as error:  # raised here, torch would put a worker's traceback into its text
        return None, corrupt, str(error)
    if any(item is None for item in items):
        return None, corrupt, ""
    return tuple(default_collate(items)), corrupt, ""


def _read_or_replace(
    dataset: Dataset[Any], seed: int, index: int, corrupt: list[CorruptItem]
) -> tuple[Any, ...] | None:
    """Return item `index` or, if it is corrupt, a replacement, which depends on `seed` and `index`.
    None if MAX_TRIES items in a row are corrupt. Corrupt items are appended to `corrupt`."""
    wanted = index
    for number in range(MAX_TRIES):
        item = read_item(dataset, wanted)
        if not isinstance(item, CorruptItem):
            return item
        corrupt.append(item)
        generator = make_generator("replacement", seed, index, number)
        wanted = int(torch.randint(len(dataset), (), generator=generator))  # type: ignore[arg-type]
    return None


def _leave_signals_to_the_run(worker: int) -> None:
    """Ignore signals in a worker: terminals and clusters signal every process, and a worker that
    dies ends the run before it can save. Torch ends a hanging worker with a second SIGTERM, which
    is not ignored."""
    for name in ("SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
