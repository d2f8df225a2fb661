"""Ctrl-C and SIGTERM end a run at the next step, after it was saved."""

import logging
import signal
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


class Stopped(SystemExit):
    """A signal ended the run; the exit status is 128 + its number, as shells have it."""


class StopSignals:
    """While entered, SIGINT and SIGTERM set a flag that all ranks agree on at each step.

    A second signal acts at once.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator = accelerator
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Return whether any rank was asked to stop."""
        if self.accelerator.num_processes == 1:
            return self.received is not None
        if self.received is not None:
            self.accelerator.set_trigger()
        return bool(self.accelerator.check_trigger())

    def leave(self, where: str) -> NoReturn:
        """End the process with the signal's status, after the run was saved."""
        number = self.received or signal.SIGTERM
        logger.info("stopped   by %s; saved %s", signal.Signals(number).name, where)
        raise Stopped(128 + number)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        self.received = number
        logger.warning(
            "received %s: saving at the end of this step; once more ends at once",
            signal.Signals(number).name,
        )
