"""One run at a time in a folder: the main process holds a lock on `<run_dir>/.lock`.

The lock is the system's (POSIX record locks), not the file: whatever ends the process releases it,
and a file that a killed run leaves behind locks nothing. Processes that were forked, such as the
loader's workers, do not inherit it. (The process itself would lose it by opening and closing the
file once more; nothing here does.) Where the file system has no locks, a warning says so.
"""

import errno
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

FILE = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)


class RunLock:
    """The lock of one folder, taken and released by one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self._handle: int | None = None

    def take(self) -> None:
        """Take the lock; the folder must be there.

        Raises:
            ValueError: another process has it.
            OSError: the folder cannot be written.
        """
        try:
            import fcntl
        except ImportError:  # Windows
            logger.warning("no locks here: see to it that no other run writes to %s", self.folder)
            return
        while self._handle is None:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip()
                os.close(handle)
                if error.errno in _HELD:
                    raise ValueError(self._taken(holder)) from error
                logger.warning(
                    "%s cannot be locked (%s): see to it that no other run writes there",
                    self.folder, error,
                )  # fmt: skip
                return
            if self._is_current(handle):
                self._handle = handle
            else:  # the one who had it has just removed the file
                os.close(handle)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give the lock back, if it was taken, and remove the file."""
        if self._handle is None:
            return
        with suppress(OSError):  # before it is given back: nobody else can have it now
            self.path.unlink()
        os.close(self._handle)
        self._handle = None

    def _is_current(self, handle: int) -> bool:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        own = os.fstat(handle)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _taken(self, holder: str) -> str:
        who = f"another process ({holder})" if holder else "another process"
        return (
            f"{who} is training in run_dir={str(self.folder)!r}. Wait for it or stop it, or choose "
            "another run_dir."
        )
