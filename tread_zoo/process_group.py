"""The connections between the processes of a launcher: made by the first run, kept, closed at exit.

Runs of a sweep follow one another in the same processes. A group that is destroyed cannot be made
anew there (the launcher's store still has the addresses of the first), so none is: each run takes
the group that it finds, with its own time limit.

Processes that come to an end together, be it a good one or not, close the group at exit. Left open,
its threads may still give back a tensor while the interpreter is being taken down, which aborts the
process: its exit status would be lost. One that ends alone, by an error, does not close it: that
would wait for the others, which wait for it, and its launcher ends them all.
"""

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist


def take_connections(device: torch.device, timeout: timedelta | None = None) -> None:
    """Make ready for a run, before accelerate is asked for its processes.

    Args:
        device: that the run's networks are on.
        timeout: after which a process that waits for another gives up; None: as it is.

    Raises:
        ValueError: processes are connected already, for another kind of device.
    """
    from accelerate.state import AcceleratorState, PartialState

    atexit.unregister(_close)  # until this run, too, is at its end
    connected = dist.is_available() and dist.is_initialized()
    # What an earlier run of this process had set, as its precision; alone, its device too.
    AcceleratorState._reset_state(reset_partial_state=not connected)
    if not connected:
        return
    known = PartialState(cpu=device.type == "cpu").device
    if known.type != device.type:
        raise ValueError(
            f"device={device.type} cannot follow a run on device={known.type} in the same "
            "processes, which are connected for that; start a sweep for each device."
        )
    if timeout is not None:
        if hasattr(dist, "set_timeout"):
            dist.set_timeout(timeout)
        else:  # before torch 2.15 it had this name
            dist.distributed_c10d._set_pg_timeout(timeout)


def leave_connections() -> None:
    """Say that every process is at the end of a run, with nothing more to tell the others: without
    another run, this one closes what connects it."""
    atexit.unregister(_close)
    atexit.register(_close)


def _close() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
