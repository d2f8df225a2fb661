"""What the processes of a run must agree on, and what is said when one of them is gone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tread_zoo.process_group import leave_connections

if TYPE_CHECKING:
    from accelerate import Accelerator, PartialState

# What torch's backends say when a peer is gone or silent.
_GONE = ("connection", "timed out", "timeout", "socket", "peer", "watchdog", "nccl", "gloo")


def largest(accelerator: "Accelerator", number: int) -> int:
    """Return the largest `number` of all ranks; every rank must call this, and waits for all."""
    if accelerator.num_processes == 1:
        return number
    shared = torch.tensor(number, device=accelerator.device)
    torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX)
    return int(shared)


class LateLargest:
    """The largest number of all ranks, one call late, so that no rank waits for its GPU.

    A call starts the exchange of its own number and returns what the call before started, which is
    through by then, or nearly. What it returns is the same on every rank.
    """

    def __init__(self) -> None:
        self._pending: Callable[[], int] | None = None

    def __call__(self, accelerator: "Accelerator", number: int, *, last: bool = False) -> int:
        """Return the largest of the last call's numbers, 0 at the first; every rank must call this.

        Args:
            accelerator: of the run; a single process has its own number at once.
            number: of this rank, 0 or more.
            last: no call will follow; wait for this one's numbers, too.
        """
        if accelerator.num_processes == 1:
            return number
        found = self._pending() if self._pending else 0
        self._pending = None if found else _exchange(number, accelerator.device)
        if last and self._pending:
            found, self._pending = self._pending(), None
        return found


def _exchange(number: int, device: torch.device) -> Callable[[], int]:
    """Start to look for the largest number of all ranks; return what waits for it and reads it."""
    shared = torch.full((), number, device=device)  # torch.tensor would wait for the GPU
    maximum = torch.distributed.ReduceOp.MAX
    work = torch.distributed.all_reduce(shared, op=maximum, async_op=True)
    if device.type != "cuda":

        def read() -> int:
            work.wait()
            return int(shared)

        return read
    work.wait()  # the GPU's stream does, not this process
    copy = torch.empty((), dtype=shared.dtype, pin_memory=True)
    copy.copy_(shared, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read_copy() -> int:
        copied.synchronize()
        return int(copy)

    return read_copy


@contextmanager
def failing_together(accelerator: "Accelerator") -> Iterator[None]:
    """Let no process wait for one that fails inside; every rank must enter this, and leaves it
    when all have come to its end.

    Raises:
        ConnectionError: another process failed; its own log says why.
    """
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = largest(accelerator, int(error is not None))
    if failed:
        leave_connections()
    if error is not None:
        raise error
    if failed:
        raise ConnectionError(
            f"rank {accelerator.process_index} of {accelerator.num_processes} stops: another "
            "process of this run could not start. Its own log has the cause."
        )


@contextmanager
def told_when_one_is_lost(
    accelerator: "Accelerator | PartialState",
    remedy: str = "continue all of them with resume=latest",
) -> Iterator[None]:
    """Turn what a backend raises when another process died into one line that says so.

    Args:
        accelerator: what knows the ranks.
        remedy: how to go on, after "Its own log has the cause;".

    Raises:
        ConnectionError: another process of the run ended or no longer answers.
    """
    try:
        yield
    except RuntimeError as error:
        words = str(error).lower()
        if accelerator.num_processes == 1 or not any(word in words for word in _GONE):
            raise
        reason = str(error).strip().splitlines()[0]
        raise ConnectionError(
            f"rank {accelerator.process_index} of {accelerator.num_processes} stops: another "
            f"process of this run ended or no longer answers ({reason}). Its own log has the "
            f"cause; {remedy}."
        ) from error
