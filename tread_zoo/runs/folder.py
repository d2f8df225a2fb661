"""The folder of a run: checked before it starts, locked while it trains.

    index.html      current state, losses and samples
    config.json     every setting                    metrics.jsonl   a line every `log_every` steps
    facts.json      data, parameters, FLOPs          scores.jsonl    a record per score
    train.log       what was printed, with times     score.json      the last score
    samples/, samples.gif, loss.png                  corrupt.txt     unreadable items
    commands.jsonl  every command that started it    checkpoints/, ema_snapshots/

Only the main process writes; scores and corrupt.txt include what other processes found.
"""

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.config import PART_FIELDS, RunConfig, make_config
from tread_zoo.registry import get_entry
from tread_zoo.runs.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_same_run,
    find_checkpoint,
    has_checkpoints,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)

CONFIG, FACTS, SCORE, SCORES = "config.json", "facts.json", "score.json", "scores.jsonl"
LOCK = ".lock"
STATE = "data", "images_per_step", "seconds", "optimizer", "scaler"  # in checkpoint.json


def resolve_run(fields: Mapping[str, Any]) -> tuple[RunConfig, Checkpoint | None]:
    """Return the configuration of a run, and the checkpoint that it continues from or None.

    `fields` are the given settings. A run that continues keeps its other settings. Nothing is
    written.

    Raises:
        ValueError: the folder contains files that may not be replaced, or the checkpoint is past
            the last step of the run.
        CheckpointError: there is no checkpoint, none is intact, or it is from another run.
    """
    resume, given = fields.get("resume"), fields.get("run_dir", "auto")
    if resume is not None and fields.get("overwrite"):
        raise ValueError(
            f"resume={resume} continues a run, and overwrite=true replaces it: set only one of "
            "them."
        )
    if resume in (None, "latest", "auto"):
        folder = Path(make_config(**fields).run_dir if given == "auto" else given)
        if resume is None or (resume == "auto" and not has_checkpoints(folder)):
            config = make_config(**fields)
            _check_free(config)
            return config, None
        if not has_checkpoints(folder):
            raise CheckpointError(
                f"resume=latest, but run_dir={str(folder)!r} holds no checkpoint. Give the "
                "command that began the run, or its folder, resume=RUN; resume=auto begins where "
                "none is."
            )
        checkpoint = find_checkpoint(folder)
    else:
        checkpoint = find_checkpoint(str(resume))
        folder = checkpoint.run_dir if given == "auto" else Path(given)
    if absent := [field for field in STATE if field not in checkpoint.meta]:
        raise CheckpointError(
            f"{checkpoint.path} cannot be resumed, because it has no {', '.join(absent)}: start a "
            "new run from its weights, init_from=…"
        )
    checkpoint.config()  # first, so that errors do not blame the fields given here
    saved = {**checkpoint.meta["config"], "overwrite": False, "resume_changed": False}
    config = make_config(**{**_with_changes(saved, fields), "run_dir": str(folder)})
    if checkpoint.step > int(config.training.num_steps):
        raise ValueError(
            f"training.num_steps={config.training.num_steps}, and {checkpoint.path} has done "
            f"{checkpoint.step} already: set training.num_steps={checkpoint.step} or more, or "
            "resume from an earlier checkpoint, resume=RUN/checkpoints/step_…"
        )
    check_same_run(checkpoint, config)
    if checkpoint.run_dir.resolve() != folder.resolve():
        _check_free(config)
    return config, checkpoint


def _with_changes(saved: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run: `saved`, changed by `given`.

    If `given` names another backbone, sampler or the like, the saved options of the earlier one are
    dropped. `auto` as the number of steps or the learning rate keeps the saved number.
    """
    merged = dict(saved)
    for field, value in given.items():
        before = saved.get(field)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        if field in PART_FIELDS and isinstance(before, Mapping):
            value = {"name": value} if isinstance(value, str) else value
            name = value.get("name", before["name"])
            if get_entry(field, str(name)).name != before["name"]:
                before = None
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            resolved = ("num_steps", "learning_rate") if field in ("training", "optimizer") else ()
            if value.get("num_flops"):
                before = {**before, "num_steps": "auto"}
            kept = {k: v for k, v in value.items() if not (k in resolved and v == "auto")}
            value = {**before, **kept}
        merged[field] = value
    return merged


def _check_free(config: RunConfig) -> None:
    """Raise a `ValueError` if the folder of a new run contains another run or other files."""
    folder = Path(config.run_dir)
    entries = _entries(folder)
    if entries and not {CONFIG, "checkpoints"} & set(entries):
        raise ValueError(
            f"run_dir={config.run_dir!r} contains files that are not from a run: "
            f"{', '.join(entries[:3])}. Choose another run_dir."
        )
    if not config.overwrite and (has_checkpoints(folder) or SCORE in entries):
        raise ValueError(
            f"run_dir={config.run_dir!r} already holds a run. Continue it with resume=latest, move "
            "it aside with overwrite=true, or choose another run_dir."
        )


@contextmanager
def open_folder(config: RunConfig, accelerator: "Accelerator") -> Iterator[Callable[[], Path]]:
    """Lock the run's folder for the main process. If `config.overwrite` is set, move an earlier run
    aside.

    Yields:
        A function that returns the folder, and raises `ValueError` if the locked folder was removed
        or replaced.

    Raises:
        ValueError: another process is training there.
    """
    folder = Path(config.run_dir)
    with ExitStack() as locks:
        if accelerator.is_main_process:
            locked = _lock(folder, locks)
            if config.overwrite and _entries(folder):
                backup = folder.with_name(f"{folder.name}.{datetime.now():%Y%m%d-%H%M%S-%f}")
                folder.rename(backup)
                locked = _lock(folder, locks)
                logger.info("overwrite the earlier run was moved to %s", backup)
        accelerator.wait_for_everyone()  # all have read what is there; now it may change

        def locked_folder() -> Path:
            if accelerator.is_main_process and not _is_there(folder / LOCK, locked):
                raise ValueError(
                    f"run_dir={config.run_dir!r} was removed or replaced while this run trained in "
                    "it. Put it back and continue with resume=latest, or start again."
                )
            return folder

        yield locked_folder


def _lock(folder: Path, locks: ExitStack) -> os.stat_result:
    """Lock a folder until `locks` closes, and return the status of its lock file. Raises ValueError
    if another process has the lock."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        locks.enter_context(FileLock(folder / LOCK, blocking=False))
    except Timeout:
        raise ValueError(
            f"another process is training in run_dir={str(folder)!r}. Wait for it or stop it, or "
            "choose another run_dir."
        ) from None
    return (folder / LOCK).stat()


def is_locked(folder: Path) -> bool:
    """Return whether a running process trains in a folder; the folder need not exist."""
    from filelock import FileLock, Timeout

    if not (folder / LOCK).exists():
        return False
    try:
        with FileLock(folder / LOCK, blocking=False):
            return False
    except Timeout:
        return True


def _is_there(file: Path, expected: os.stat_result) -> bool:
    try:
        return os.path.samestat(file.stat(), expected)
    except FileNotFoundError:
        return False
    except OSError:  # the file system does not answer now
        return True


def _entries(folder: Path) -> list[str]:
    """Return the names in a folder, sorted and without hidden ones; empty if there is no folder."""
    paths = folder.iterdir() if folder.exists() else ()
    return sorted(path.name for path in paths if not path.name.startswith("."))
