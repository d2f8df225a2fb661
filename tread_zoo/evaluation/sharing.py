"""Which part of an evaluation a process does, and how the parts come together again.

Image batches are dealt out whole, batch k to process k mod `num_processes`: a batch then holds the
same images as in a single process, and its features have the same bits on the same hardware.

Dimensions: n rows of a process, N rows of all.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tread_zoo.process_group import leave_connections, take_connections


@dataclass(frozen=True)
class Share:
    """Process `rank` of `num_processes`; alone by default, when nothing is communicated."""

    rank: int = 0
    num_processes: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that scores and writes."""
        return self.rank == 0

    def batches(self, num_images: int, batch_size: int) -> Iterator[range]:
        """Yield the ranges of images that are this process's."""
        stride = batch_size * self.num_processes
        for first in range(self.rank * batch_size, num_images, stride):
            yield range(first, min(first + batch_size, num_images))

    def in_order(self, rows: Tensor | None, num_images: int, batch_size: int) -> Tensor:
        """Return rows [N, …] of all images in their order, on the CPU, in every process.

        Args:
            rows: [n, …] of this process's images, in the order of `batches`; None where it has no
                batch at all.
        """
        parts = self.gather(rows)
        if self.num_processes == 1:
            return parts[0]
        out = parts[0].new_empty((num_images, *parts[0].shape[1:]))
        for rank, part in enumerate(parts):
            taken = 0
            for batch in Share(rank, self.num_processes).batches(num_images, batch_size):
                out[batch.start : batch.stop] = part[taken : taken + len(batch)]
                taken += len(batch)
        return out

    def gather(self, rows: Tensor | None) -> list[Tensor]:
        """Return the rows [n, …] of every process that has some, in the order of their ranks, on
        the CPU. They may differ in number."""
        if self.num_processes == 1:
            return [] if rows is None else [rows.cpu()]
        import torch.distributed as dist

        own = None if rows is None else (len(rows), tuple(rows.shape[1:]), rows.dtype)
        told: list[tuple[int, tuple[int, ...], torch.dtype] | None] = [None] * self.num_processes
        dist.all_gather_object(told, own)
        known = [one for one in told if one is not None]
        if not known:
            return []
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        shape = (max(count for count, _, _ in known), *known[0][1])
        padded = torch.zeros(shape, dtype=known[0][2], device=device)
        if rows is not None:
            padded[: len(rows)] = rows
        found = [torch.empty_like(padded) for _ in told]
        dist.all_gather(found, padded)
        return [
            part[: one[0]].cpu() for part, one in zip(found, told, strict=True) if one is not None
        ]

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.num_processes > 1:
            import torch.distributed as dist

            dist.barrier()


def start_share(device: torch.device) -> Share:
    """Return this process's share of what `accelerate launch` or torchrun started.

    Args:
        device: that networks run on; on a GPU each process takes its own from here on.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Share()
    from accelerate import PartialState

    take_connections(device)
    state = PartialState(cpu=device.type == "cpu")
    return Share(state.process_index, state.num_processes)


def end_share(share: Share) -> None:
    """Say that all went well: the connections between processes are closed when this one ends."""
    if share.num_processes > 1:
        leave_connections()
