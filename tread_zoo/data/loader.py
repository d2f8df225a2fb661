"""From batches of indices to batches of images. B batch, C channels, H height, W width."""

import signal
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tread_zoo.data.dataset import ArrayDataset
from tread_zoo.seeding import make_generator


def make_loader(
    dataset: Dataset, batches: Iterable[list[int]], num_workers: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an iterator of (images uint8 [B,C,H,W], labels int64 [B]), in the order of `batches`.

    Images in memory are indexed directly, with no worker, since one would only copy them. All
    others go through torch's DataLoader with `num_workers` processes. Draws nothing from the
    global generators.
    """
    if num_workers < 0:
        raise ValueError(
            f"data.num_workers={num_workers} must be 0 (read in the training process) or more."
        )
    if isinstance(dataset, ArrayDataset):
        return _gather_batches(dataset, batches)
    return iter(
        DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=num_workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_leave_signals_to_the_run,
            # DataLoader draws its workers' seed, else from the global generator.
            generator=make_generator("workers"),
        )
    )


def _leave_signals_to_the_run(worker: int) -> None:
    """Ctrl-C and clusters signal every process; a worker that dies of it takes the run along,
    before it could save.

    Workers end when the run closes them or is gone. One that hangs in a read is ended by torch
    with SIGTERM, of which therefore only the first is passed over.
    """
    for name in ("SIGINT", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(number, signal.SIG_DFL))


def _gather_batches(
    dataset: ArrayDataset, batches: Iterable[list[int]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for indices in batches:
        yield dataset.gather(torch.tensor(indices, dtype=torch.int64))
