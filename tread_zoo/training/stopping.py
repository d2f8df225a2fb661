"""Signals end a run at the next step, after it was saved, with a status that says which it was.

    signal              sent by                                   exit status
    SIGINT              Ctrl-C                                    130 = 128 + 2
    SIGTERM             kill, a launcher, a cluster that ends it  143 = 128 + 15
    SIGUSR1, SIGUSR2    SLURM (--signal=USR1@120), submitit       75: run the same command again

75 is EX_TEMPFAIL of sysexits.h. docs/faults.md says how a job script requeues on it.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from tread_zoo.process_group import leave_connections
from tread_zoo.requeue import REQUEUE_SIGNALS, REQUEUE_STATUS, end_at_once, tell
from tread_zoo.training.ranks import LateLargest, largest

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

# A launcher passes on a signal that the terminal or the cluster sent to everyone already.
REPEAT_SECONDS = 3.0

# Where ranks or moments differ, the later of these decides: a job that is to be requeued is.
_ORDER: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM, *REQUEUE_SIGNALS)


class Stopped(SystemExit):
    """A signal ended the run; the module's docstring has the exit status."""


class StopSignals:
    """While entered, signals stop the run; inside `deferred`, only after the step was saved.

    Outside `deferred` nothing is under way that saving would keep: SIGINT and SIGTERM do what they
    always do, and the signals that requeue end the process at once with a line and their status.
    """

    def __init__(self) -> None:
        self.received: dict[int, float] = {}
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()
        self._largest = LateLargest()

    def __enter__(self) -> "StopSignals":
        self._handle(REQUEUE_SIGNALS, self._leave_now)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Note signals instead of obeying them; `requested` tells of them.

        The same SIGINT or SIGTERM once more, seconds later, acts at once.
        """
        self._handle(_ORDER, self._note)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._before[number])
            self._handle(REQUEUE_SIGNALS, self._leave_now)
        for late in self.received:  # came after the last step had asked
            signal.raise_signal(late)

    def requested(self, accelerator: "Accelerator", *, last: bool = False) -> bool:
        """Return whether any rank was asked to stop; every rank must call this at each step.

        Several ranks agree one step late (see `LateLargest`), but for the run's `last` step.
        """
        mine = max((_ORDER.index(number) + 1 for number in self.received), default=0)
        agreed = self._largest(accelerator, mine, last=last)
        if agreed:
            self.received.setdefault(_ORDER[agreed - 1], time.monotonic())
        return agreed > 0

    def leave(self, where: str, accelerator: "Accelerator") -> NoReturn:
        """End the process after the run was saved to `where`; every rank must call this.

        Whoever handled the signal before, as submitit does to requeue its job, gets it first, and
        no rank ends before all have been here: a task that ends may take its job along.
        """
        number = max(self.received, key=_ORDER.index)
        logger.info("stopped   by %s; saved %s", signal.Signals(number).name, where)
        try:
            if number in REQUEUE_SIGNALS:
                self._hand_on(number)
        finally:
            largest(accelerator, 0)
            leave_connections()
        raise Stopped(_status(number))

    def _handle(self, numbers: tuple[int, ...], handler: Any) -> None:
        for number in numbers:
            before = signal.signal(number, handler)
            self._before.setdefault(number, before)

    def _leave_now(self, number: int, frame: FrameType | None) -> None:
        tell(number)
        self._hand_on(number, frame)
        raise Stopped(_status(number))

    def _hand_on(self, number: int, frame: FrameType | None = None) -> None:
        """Let whoever handled a signal before have it; what a script began with is replaced."""
        before = self._before[number]
        if callable(before) and before is not end_at_once:
            before(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a process that was forked from this one
        now = time.monotonic()
        first = self.received.setdefault(number, now)
        if first == now:
            logger.warning(
                "received %s: saving at the end of this step%s", signal.Signals(number).name,
                "" if number in REQUEUE_SIGNALS else "; once more ends at once",
            )  # fmt: skip
        elif number not in REQUEUE_SIGNALS and now - first > REPEAT_SECONDS:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


def _status(number: int) -> int:
    return REQUEUE_STATUS if number in REQUEUE_SIGNALS else 128 + number
