"""What the processes of a run must agree on, and what is said when one of them is gone."""

from collections.abc import Iterator
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
