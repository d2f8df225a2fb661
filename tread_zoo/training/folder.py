"""A run's folder: whose it is, one run at a time in it, and what another run left there.

    check_folder    before any work: is there anything that must not be replaced?
    RunFolder.open  the lock, `.lock`; what is to be replaced goes to `.replaced`
    .keep           the first step is done: from here on a failure leaves what there is
    .saved          the first checkpoint of the new run is on the disk: `.replaced` is deleted

A run that fails before `keep` leaves the folder as it found it, or none. One that is killed, or
fails between `keep` and `saved`, leaves the older run in `.replaced`.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tread_zoo.training.checkpoints import META_NAME, Checkpoint, has_checkpoints
from tread_zoo.training.files import CONFIG, FAILED
from tread_zoo.training.lock import RunLock
from tread_zoo.training.scoring import FILE as SCORES

logger = logging.getLogger(__name__)

# All that a run writes, and what sample.py adds to it.
OF_A_RUN = (
    "checkpoints", "samples", "generated", "tensorboard", "wandb", "wandb_id", "metrics.jsonl",
    "loss.png", "score.json", SCORES, "corrupt.txt", CONFIG, FAILED, "reference.md",
    "reference.png",
)  # fmt: skip
# Without checkpoints, too, these are worth more than what a run that was cut off leaves.
RESULTS = ("score.json", "generated")
REPLACED = ".replaced"
_SECTIONS = {"backbone", "routing", "objective", "data", "training"}


def check_folder(run_dir: str | Path, checkpoint: Checkpoint | None, *, overwrite: bool) -> None:
    """Check that a run may write into `run_dir`; nothing is changed.

    Args:
        run_dir: the folder.
        checkpoint: that the run continues from, or None.
        overwrite: replace the run that is there.

    Raises:
        ValueError: it is no folder, or it holds what may not be replaced.
    """
    if not str(run_dir):
        raise ValueError(
            "run_dir='' would be the current folder; name one, as in run_dir=runs/mine."
        )
    folder = Path(run_dir)
    there = next(path for path in (folder, *folder.parents) if path.exists() or path == Path("."))
    if not there.is_dir():
        raise ValueError(f"run_dir={str(folder)!r}: {there} is a file; name another folder.")
    if checkpoint is not None and is_in(checkpoint, folder):
        return
    found = _there(folder)
    if found and not is_run(folder):
        raise ValueError(
            f"run_dir={str(folder)!r} holds {', '.join(found)}, and no run of this project made "
            "them: they would be replaced. Choose another run_dir."
        )
    if overwrite:
        return
    if has_checkpoints(folder) or any((folder / name).exists() for name in RESULTS):
        another = f" that {checkpoint.path} is not of" if checkpoint is not None else ""
        raise ValueError(
            f"run_dir={str(folder)!r} already holds a run{another}. Continue it with "
            "resume=latest, replace it with overwrite=true, or choose another run_dir."
        )


def is_in(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether a checkpoint is of the run in `folder`."""
    return folder.resolve() in checkpoint.path.resolve().parents


def is_run(folder: Path) -> bool:
    """Return whether a run of ours left its settings or a checkpoint in `folder`."""
    if any((folder / "checkpoints").glob(f"step_*/{META_NAME}")):
        return True
    with suppress(OSError, ValueError):
        settings = json.loads((folder / CONFIG).read_text())
        return isinstance(settings, dict) and settings.keys() >= _SECTIONS
    return False


class RunFolder:
    """The folder of a run that is under way; the main process's alone opens and changes it.

    As a context it is left as the module's docstring says. Processes that do not open it pass
    through.

    Args:
        run_dir: the folder.
        checkpoint, overwrite: see `check_folder`.
    """

    def __init__(self, run_dir: str | Path, checkpoint: Checkpoint | None, *, overwrite: bool):
        self.path = Path(run_dir)
        self.replaces = checkpoint is None or not is_in(checkpoint, self.path)
        self._check = lambda: check_folder(run_dir, checkpoint, overwrite=overwrite)
        self._lock = RunLock(self.path)
        self._made: list[Path] = []  # folders that were not there before, the innermost first
        self._is_open = self._kept = False
        self.before_undo: Callable[[], None] = lambda: None  # closes what writes into it

    def open(self) -> None:
        """Lock the folder, which is made, and put aside what the run replaces.

        Raises:
            ValueError: another process is training in it; or see `check_folder`.
            OSError: it cannot be made or written.
        """
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock.take()
        try:
            self._check()  # again: another run may have ended there since
            if self.replaces:
                self._put_aside()
        except BaseException:
            self._lock.release()
            raise
        self._is_open = True

    def keep(self) -> None:
        """Say that a step was done, whose numbers are worth keeping."""
        self._kept = True

    def saved(self) -> None:
        """Say that a checkpoint of this run is on the disk."""
        if (self.path / REPLACED).exists():
            shutil.rmtree(self.path / REPLACED, ignore_errors=True)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_open:
            if error is not None and self.replaces and not self._kept:
                self._undo()
            elif (self.path / REPLACED).exists():
                logger.warning("the run that was here before lies in %s", self.path / REPLACED)
            self._lock.release()
        for path in self._made:  # those that nothing was written to
            with suppress(OSError):
                path.rmdir()

    def _put_aside(self) -> None:
        """Move what another run left to `.replaced`.

        Where a run was cut off while it replaced another, the one that has checkpoints stays.
        """
        aside = self.path / REPLACED
        if aside.exists() and not has_checkpoints(self.path):
            for name in _there(self.path):
                _remove(self.path / name)
            return
        _remove(aside)
        for name in _there(self.path):
            aside.mkdir(exist_ok=True)
            (self.path / name).rename(aside / name)

    def _undo(self) -> None:
        """Take away what this run wrote, and put back what it replaced."""
        self.before_undo()
        for name in _there(self.path):
            _remove(self.path / name)
        aside = self.path / REPLACED
        for path in list(_entries(aside)):
            path.rename(self.path / path.name)
        with suppress(OSError):
            aside.rmdir()


def _there(folder: Path) -> list[str]:
    return [name for name in OF_A_RUN if os.path.lexists(folder / name)]


def _entries(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
