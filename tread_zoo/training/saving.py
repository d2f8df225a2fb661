"""When saving fails: go on a while, or stop, with the last good checkpoint intact either way.

A disk that several people fill is often free again soon, so a checkpoint on the way that cannot be
written is a warning, and the next one is the next attempt. A run that cannot save is worth nothing,
so several failures in a row stop it; so does one at the end or after a signal, where no later
attempt will come.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tread_zoo.process_group import leave_connections
from tread_zoo.training.checkpoints import CheckpointError
from tread_zoo.training.ranks import largest

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

MAX_FAILED_IN_A_ROW = 3


class SaveAttempts:
    """Counts failures to save; all ranks go on or stop together."""

    def __init__(self, accelerator: "Accelerator") -> None:
        self.accelerator = accelerator
        self.failed_in_a_row = 0

    def attempt(self, save: Callable[[], None], *, must: bool) -> None:
        """Save; every rank must call this, and waits until all have.

        Args:
            save: what this rank does.
            must: no later attempt will come.

        Raises:
            CheckpointError: it failed, and it must not, or failed too often in a row.
        """
        error = None
        try:
            save()
        except CheckpointError as caught:
            error = caught
        if not largest(self.accelerator, int(error is not None)):
            self.failed_in_a_row = 0
            return
        self.failed_in_a_row += 1
        if must or self.failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            leave_connections()
            raise error or CheckpointError("another process of this run could not save.")
        if error:
            logger.warning(
                "%s Training goes on; the next checkpoint is the next attempt (failure %d of %d).",
                error, self.failed_in_a_row, MAX_FAILED_IN_A_ROW,
            )  # fmt: skip
