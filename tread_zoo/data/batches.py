"""Which images step k sees, as a function of (seed, rank, k) alone."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tread_zoo.seeding import make_generator


class StepBatches:
    """Index lists for the steps start_step … num_steps - 1 of a run; a torch batch sampler.

    Epoch e is a permutation drawn from (seed, e) alone, cut into global batches of
    batch_size * num_ranks; rank r takes the r-th slice of each. The tail of an epoch that does
    not fill a global batch is dropped (another tail in each epoch).

    A run resumed with `start_step=k` sees what the unbroken one would have seen; nothing is
    replayed. With another number of ranks but the same global batch, a step sees the same images,
    dealt out otherwise. Another global batch is another order.

    Raises:
        ValueError: there are fewer items than a global batch.
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
        if num_items < batch_size * num_ranks:
            raise ValueError(
                f"batch_size={batch_size} on {num_ranks} rank(s) asks for "
                f"{batch_size * num_ranks} images a step, but the training part has {num_items}. "
                f"Use a batch size of at most {max(num_items // num_ranks, 1)}"
                + ("." if num_items >= num_ranks else " on fewer ranks.")
            )
        self.num_items, self.batch_size, self.seed = num_items, batch_size, seed
        self.num_steps, self.start_step = num_steps, start_step
        self.rank, self.num_ranks = rank, num_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch."""
        return self.num_items // (self.batch_size * self.num_ranks)

    def __len__(self) -> int:
        return self.num_steps - self.start_step

    def __iter__(self) -> Iterator[list[int]]:
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for step in range(self.start_step, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self._epoch_order(epoch)
            start = (step % self.steps_per_epoch) * self.batch_size * self.num_ranks
            start += self.rank * self.batch_size
            yield order[start : start + self.batch_size].tolist()

    def _epoch_order(self, epoch: int) -> Tensor:
        """Return the permutation int64 [num_items] of one epoch."""
        return torch.randperm(self.num_items, generator=make_generator("data", self.seed, epoch))
