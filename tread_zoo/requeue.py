"""The signals by which a cluster announces the end of a job, before there is a run that could save.

    SIGUSR1, SIGUSR2    SLURM (--signal=USR1@120), submitit    75: run the same command again

Left to the system they end a process with 138 or 140, which no job script requeues on.
`tread_zoo.training.stopping` takes them over while a run is under way.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

REQUEUE_STATUS = 75
REQUEUE_SIGNALS: tuple[int, ...] = tuple(
    getattr(signal, n) for n in ("SIGUSR1", "SIGUSR2") if hasattr(signal, n)
)
_installed_by = 0


def answer_requeue_signals() -> None:
    """End this process at once, with a line and status 75, when one of the signals comes.

    Scripts that can be requeued call it before they import what takes long. Where somebody else
    handles a signal already, as submitit does, that stays. Call it in the main thread.
    """
    global _installed_by
    _installed_by = os.getpid()
    for number in REQUEUE_SIGNALS:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, end_at_once)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """End the process as the handler of a signal.

    No exception: an import that is under way might swallow it, as might any `except:`. What is
    written by then is whole or is left over, as after SIGKILL.
    """
    if os.getpid() != _installed_by:
        return  # a process that was forked from this one
    tell(number)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(REQUEUE_STATUS)


def tell(number: int) -> None:
    """Say which signal ended the process; straight to the terminal or log, for a handler may have
    interrupted a print."""
    line = f"stopped by {signal.Signals(number).name}; run the same command again\n"
    with suppress(OSError):
        os.write(2, line.encode())
