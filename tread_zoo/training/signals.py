"""Signals that end a run: it saves after the current step (a few steps later with several
processes) and exits.

    signal              sent by                                   exit status
    SIGHUP              a terminal that is closed                 129 = 128 + 1
    SIGINT              Ctrl-C                                    130 = 128 + 2
    SIGTERM             kill, a launcher, a cluster that ends it  143 = 128 + 15
    SIGUSR1, SIGUSR2    SLURM (--signal=USR1@120), submitit       75: run the same command again

75 is EX_TEMPFAIL in sysexits.h; docs/distributed.md shows a job script that requeues on it. SIGHUP
stays ignored under nohup.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)

REQUEUE_STATUS = 75
REQUEUE_SIGNALS: tuple[int, ...] = (signal.SIGUSR1, signal.SIGUSR2)
# By priority: if several signals came, in any process, the last of this order decides.
SIGNALS: tuple[int, ...] = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, *REQUEUE_SIGNALS)
AGAIN_AT_ONCE = (signal.SIGINT, signal.SIGTERM)
# A launcher repeats signals that the terminal or cluster has already sent to every process.
REPEAT_SECONDS = 3.0


class Stopped(SystemExit):
    """A signal ended the run; the module's docstring lists the exit statuses."""


def requeue_from_the_start() -> None:
    """Let SIGUSR1 and SIGUSR2 end the process with status 75 until `StopSignals` takes over; Python
    would end it with another status. Until `imported` is called, Ctrl-C ends the process with one
    line of text, because an interrupted import may raise any exception."""
    for number in REQUEUE_SIGNALS:
        signal.signal(number, _requeue)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def imported() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"stopped by Ctrl-C before anything began\n")
    os._exit(130)


def _requeue(number: int, frame: FrameType | None) -> NoReturn:
    raise Stopped(REQUEUE_STATUS)


def strongest(numbers: Sequence[int]) -> int:
    """Return the signal with the highest priority, the last in `SIGNALS`, or 0 without signals."""
    return max(numbers, default=0, key=SIGNALS.index)


class StopSignals:
    """Context manager for SIGHUP, SIGINT, SIGTERM, SIGUSR1 and SIGUSR2, which ask a run to stop.

    Within the inner context `deferred` they are recorded, so that the run can save before it ends.
    Outside of `deferred` there is nothing to save: the first three signals act as usual, SIGUSR1
    and SIGUSR2 end the process at once with status 75.
    """

    def __init__(self) -> None:
        self.received: dict[int, float] = {}
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> "StopSignals":
        self._handle(REQUEUE_SIGNALS, self._exit_now)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self, max_time_s: float | None = None) -> Iterator[None]:
        """Record signals in `received` instead of obeying them. If `max_time_s` is set, a SIGUSR1
        is recorded after that many seconds. A second SIGINT or SIGTERM, more than `REPEAT_SECONDS`
        after the first, acts at once. At the normal end of the block, recorded signals act, too."""
        self._handle(SIGNALS, self._record)
        timer = threading.Timer(max_time_s or 0, self._record, (signal.SIGUSR1, None))
        timer.daemon = True
        if max_time_s is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()
            for number in set(self._before) - set(REQUEUE_SIGNALS):
                signal.signal(number, self._before[number])
            self._handle(REQUEUE_SIGNALS, self._exit_now)
        for late in self.received if self._before else ():  # after the last step
            signal.raise_signal(late)

    @contextmanager
    def interrupting(self, network: "nn.Module") -> Iterator[None]:
        """Leave the `with` block at the first call of `network` after a signal was recorded."""

        def check(module: "nn.Module", given: object) -> None:
            if module is network and self.received:  # copies of the network count FLOPs
                raise Stopped

        hook = network.register_forward_pre_hook(check)
        try:
            with suppress(Stopped):
                yield
        finally:
            hook.remove()

    def exit(self, number: int) -> NoReturn:
        """End the process because of signal `number`. For SIGUSR1 and SIGUSR2, an earlier handler,
        such as submitit's, is called first."""
        before = self._before.get(number)
        if number in REQUEUE_SIGNALS and callable(before):
            before(number, None)
        raise Stopped(REQUEUE_STATUS if number in REQUEUE_SIGNALS else 128 + number)

    def _handle(self, numbers: tuple[int, ...], handler: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may set handlers
        for number in numbers:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            before = signal.signal(number, handler)
            self._before.setdefault(number, before)

    def _exit_now(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            logger.warning("stopped   by %s; run the same command again", _name(number))
            self.exit(number)

    def _record(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a process that was forked from this one
        now = time.monotonic()
        first = self.received.setdefault(number, now)
        if first == now:
            again = "; once more ends at once" if number in AGAIN_AT_ONCE else ""
            logger.warning("received %s: saving soon, then ending%s", _name(number), again)
        elif number in AGAIN_AT_ONCE and now - first > REPEAT_SECONDS:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def _name(number: int) -> str:
    return signal.Signals(number).name
