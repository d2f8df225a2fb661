"""Which images a step sees, and batches of them, past items that cannot be read.

The order is a function of (seed, epoch) alone. A data set says that an item is corrupt by raising
`ValueError` or `OSError` when it is read; its place is then taken by another, which (seed, index)
alone decides:

    index -> first readable of  draw(seed, index, 0), draw(seed, index, 1), …

so a batch is the same in a resumed run, in another worker, and at another time.

B batch, C channels, H height, W width; where items have contexts, float [T, S], these are read in
place of labels; where they have features [K, S, h, w], these come third.
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

from tread_zoo.data.files import printable
from tread_zoo.seeding import make_generator

logger = logging.getLogger(__name__)

MAX_TRIES = 16  # of one item's replacements, before the data as a whole are given up


class StepBatches:
    """Index lists for the steps start_step … num_steps - 1 of a run; a torch batch sampler.

    Epoch e is a permutation drawn from (seed, e) alone, cut into global batches of
    batch_size * num_ranks; rank r takes the r-th slice of each. The tail of an epoch that does
    not fill a global batch is dropped (another tail in each epoch). A run resumed with
    `start_step=k` sees what the unbroken one would have seen, and so do other numbers of ranks
    with the same global batch. Raises ValueError if there are fewer items than a global batch.
    """

    def __init__(
        self,
        num_items: int,
        batch_size: int,
        *,
        seed: int,
        num_steps: int,
        rank: int = 0,
        num_ranks: int = 1,
        start_step: int = 0,
    ):
        global_batch = batch_size * num_ranks
        if num_items < global_batch:
            raise ValueError(
                f"batch_size={batch_size} on {num_ranks} rank(s) needs {global_batch} images a "
                f"step, but the training part has {num_items}."
            )
        self.num_items, self.batch_size, self.seed = num_items, batch_size, seed
        self.num_steps, self.start_step = num_steps, start_step
        self.rank, self.num_ranks = rank, num_ranks
        self.steps_per_epoch = num_items // global_batch

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for step in range(self.start_step, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                generator = make_generator("data", self.seed, epoch)
                order = torch.randperm(self.num_items, generator=generator)
            place = step % self.steps_per_epoch * self.num_ranks + self.rank
            yield order[place * self.batch_size : (place + 1) * self.batch_size].tolist()


# Corrupt items ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CorruptItem:
    """An item that could not be read: its index, its name in the data set, and the reason."""

    index: int
    name: str
    reason: str

    @property
    def line(self) -> str:
        """Return its line of corrupt.txt."""
        reason = " ".join(self.reason.split())
        return "\t".join((str(self.index), printable(self.name), printable(reason))) + "\n"


OnCorrupt = Callable[[CorruptItem], None]


def read_item(dataset: Dataset[Any], index: int) -> tuple[Any, ...] | CorruptItem:
    """Return an item, or what is wrong with it."""
    try:
        item: tuple[Any, ...] = dataset[index]
    except (ValueError, OSError) as error:
        name_of = getattr(dataset, "item_name", "item {}".format)
        return CorruptItem(index, name_of(index), str(error) or type(error).__name__)
    return item


def warn_of(item: CorruptItem) -> None:
    """Log which item could not be read."""
    logger.warning("corrupt   %s is passed over: %s", printable(item.name), printable(item.reason))


class CorruptLog:
    """Lists the items of `parts` that cannot be read, whoever reads them from now on, and ends a
    run when they are too many.

    Every process appends what it meets to the same file, `corrupt.txt`, one line for each item
    (index, name and reason, with tabs between), and counts the distinct items in it: so no process
    waits for another. `max_share` is the fraction of all items that may be corrupt, rounded up.
    """

    def __init__(self, file: Path, parts: Iterable[Any], max_share: float):
        self.file, self.num_items, self.max_share = file, 0, max_share
        for part in parts:
            with suppress(AttributeError):  # of a list, whose items are read already
                part.on_corrupt = self
            self.num_items += len(part)

    @property
    def items(self) -> set[str]:
        """The corrupt items, by index and name, that all processes have met so far."""
        text = self.file.read_text(errors="replace") if self.file.exists() else ""
        return {line.rpartition("\t")[0] for line in text.split("\n") if line.count("\t") == 2}

    def __call__(self, item: CorruptItem) -> None:
        """Add an item, if it is new. Raises ValueError if they are too many."""
        items, name = self.items, item.line.rpartition("\t")[0]
        if name not in items:
            warn_of(item)
            with self.file.open("a") as stream:
                stream.write(item.line)
            items.add(name)
        if len(items) > math.ceil(self.max_share * self.num_items):
            raise ValueError(
                f"{len(items)} of {self.num_items} images cannot be read, more than "
                f"max_corrupt_share={self.max_share:g} allows: {self.file} lists them. Put whole "
                "files in their places, or raise max_corrupt_share, and continue."
            )


# Batches ------------------------------------------------------------------------------------------


def make_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[int]],
    num_workers: int = 0,
    *,
    seed: int = 0,
) -> Iterator[tuple[Tensor, ...]]:
    """Return an iterator of (images [B,C,H,W], labels int64 [B]), and features if items have them,
    of the lists of indices `batches`.

    Images in memory (a data set with `gather`) are indexed directly. All others are read by
    `num_workers` processes (0: this one), which live as long as the iterator, each two batches
    ahead. Nothing is read or started before the first batch is requested, or drawn from the global
    generators. `seed` decides, with its index, what replaces a corrupt item; `dataset.on_corrupt`,
    or else a warning, is called in this process, once for each; `dataset.item_name(index)`, if it
    has that, names it.

    Raises:
        ValueError: later, items of which no replacement can be read.
    """
    gather = getattr(dataset, "gather", None)
    if gather is not None:
        return (gather(torch.tensor(indices, dtype=torch.int64)) for indices in batches)
    return _read_batches(dataset, batches, num_workers, seed)


def copy_ahead(
    batches: Iterator[tuple[Tensor, ...]], device: torch.device
) -> Iterator[tuple[Tensor, ...]]:
    """Return the batches, for a GPU copied to it while it computes what was queued before."""
    if device.type != "cuda":
        yield from batches
        return
    copies = torch.cuda.Stream(device)
    for batch in batches:
        with torch.cuda.stream(copies):
            there = tuple(t.pin_memory().to(device, non_blocking=True) for t in batch)
        current = torch.cuda.current_stream(device)
        current.wait_stream(copies)
        for tensor in there:
            tensor.record_stream(current)
        yield there


def read_items(dataset: Dataset[Any], indices: Sequence[int]) -> tuple[Tensor, ...]:
    """Return (images [B,…], labels int64 [B]) of some items, read in this process. Another item
    takes the place of a corrupt one, as in `make_loader`."""
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
        # DataLoader draws its workers' seed, else from the global generator.
        generator=make_generator("workers"),
    )
    on_corrupt: OnCorrupt = getattr(dataset, "on_corrupt", warn_of)
    reported: set[int] = set()
    for tensors, corrupt in loader:
        for item in corrupt:
            if item.index not in reported:
                reported.add(item.index)
                on_corrupt(item)
        if tensors is None:
            raise ValueError(
                f"{MAX_TRIES} items in a row cannot be read, among them {corrupt[-1].name} "
                f"({corrupt[-1].reason}). Look whether the disk or the folder is there."
            )
        yield tensors


def _read_batch(
    dataset: Dataset[Any], seed: int, indices: Sequence[int]
) -> tuple[tuple[Tensor, ...] | None, list[CorruptItem]]:
    """Return (images [B,…], labels int64 [B], …), or None where neither an item nor any of its
    replacements can be read, and the corrupt items."""
    corrupt: list[CorruptItem] = []
    items = [_read_or_replace(dataset, seed, index, corrupt) for index in indices]
    if any(item is None for item in items):
        return None, corrupt
    return tuple(default_collate(items)), corrupt


def _read_or_replace(
    dataset: Dataset[Any], seed: int, index: int, corrupt: list[CorruptItem]
) -> tuple[Any, ...] | None:
    """Return item `index`, or what replaces it; note what is corrupt."""
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
    dies of it takes the run along, before it could save. Torch ends one that hangs with a second
    SIGTERM."""
    for name in ("SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))
