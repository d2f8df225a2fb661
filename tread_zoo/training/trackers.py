"""Where numbers and pictures of a run go: always a local file, and a tracker if asked for.

The local `metrics.jsonl` has one JSON object a line, each with its `step`. wandb and tensorboard
get the same names.
"""

import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tread_zoo.errors import unknown_name
from tread_zoo.registry import register
from tread_zoo.training.files import write_text

logger = logging.getLogger(__name__)

TRACKERS = ("local", "wandb", "tensorboard")


class Tracker(Protocol):
    """Receives what is logged."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of optimizer step `step`."""

    def image(self, step: int, name: str, path: Path) -> None:
        """Take a picture that was written to `path`."""

    def close(self) -> None:
        """Finish writing."""


class LocalTracker:
    """`metrics.jsonl` in the run's folder; lines after `step` are dropped when a run resumes.

    A line that cannot be written is lost with a warning, and the next one is tried again.
    """

    def __init__(self, run_dir: Path, step: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        lines = [row for row in read_metrics(run_dir) if row["step"] <= step]
        beside = self.path.with_suffix(".partial")
        beside.write_text("".join(json.dumps(row) + "\n" for row in lines))
        beside.replace(self.path)
        self.failed = False

    def log(self, step: int, values: dict[str, float]) -> None:
        line = json.dumps({"step": step, **values}) + "\n"
        try:
            with self.path.open("a") as stream:
                stream.write("\n" + line if self.failed else line)  # half a line may be there
            self.failed = False
        except OSError as error:
            if not self.failed:
                logger.warning("%s lacks lines from step %d on: %s", self.path, step, error)
            self.failed = True

    def image(self, step: int, name: str, path: Path) -> None:
        pass  # it already lies in the run's folder

    def close(self) -> None:
        pass


class Dispensable:
    """Passes all on to another tracker until it fails once; the run goes on without it.

    It is not tried again before the run resumes: a service that is down answers slowly, and what it
    missed is in the local file.

    Args:
        name: of the tracker, for the warning.
        build: makes it.
    """

    def __init__(self, name: str, build: Callable[[], Tracker]) -> None:
        self.name = name
        self.tracker: Tracker | None = None
        self._try(lambda: setattr(self, "tracker", build()))

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.tracker:
            self._try(partial(self.tracker.log, step, values))

    def image(self, step: int, name: str, path: Path) -> None:
        if self.tracker:
            self._try(partial(self.tracker.image, step, name, path))

    def close(self) -> None:
        if self.tracker:
            self._try(self.tracker.close)

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever a service and its client may raise
            self.tracker = None
            logger.warning(
                "tracker=%s failed and gets no more of this run, which goes on; metrics.jsonl has "
                "all of it (%s: %s)", self.name, type(error).__name__, error,
            )  # fmt: skip


class WandbTracker:
    """Weights & Biases; without a key, and without WANDB_MODE, it works offline and never asks."""

    def __init__(self, run_dir: Path, config: dict[str, Any], project: str) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE")
        if mode is None and not _has_wandb_key():
            mode = "offline"
            logger.warning(
                "wandb: no API key found, so the run is logged offline in %s/wandb; "
                "`wandb login` or WANDB_API_KEY changes that, `wandb sync` uploads it later.",
                run_dir,
            )
        self.wandb = wandb
        self.run = wandb.init(
            project=project,
            name=run_dir.name,
            id=_wandb_id(run_dir / "wandb_id"),
            resume="allow",
            dir=str(run_dir),
            config=config,
            mode=mode,  # type: ignore[arg-type]
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        self.run.log({name: self.wandb.Image(str(path))}, step=step)

    def close(self) -> None:
        self.run.finish()


class TensorboardTracker:
    """Event files in the run's folder."""

    def __init__(self, run_dir: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def image(self, step: int, name: str, path: Path) -> None:
        import numpy as np
        from PIL import Image

        picture = np.asarray(Image.open(path).convert("RGB"))
        self.writer.add_image(name, picture, step, dataformats="HWC")

    def close(self) -> None:
        self.writer.close()


@register("tracker", "local")
@dataclass(frozen=True)
class LocalOptions:
    """metrics.jsonl alone."""


@register("tracker", "tensorboard")
@dataclass(frozen=True)
class TensorboardOptions:
    """Event files in the run's folder."""


@register("tracker", "wandb")
@dataclass(frozen=True)
class WandbOptions:
    """Weights & Biases."""

    project: str = "tread_zoo"


def check_tracker(name: str) -> None:
    """Check a tracker's name and package before any work is done.

    Raises:
        ValueError: an unknown name, or its package is not installed.
    """
    if name not in TRACKERS:
        raise unknown_name("tracker.name", name, TRACKERS)
    if name != "local" and importlib.util.find_spec(name) is None:
        raise ValueError(
            f"tracker.name={name!r}: the package {name} is not installed; "
            f'run `pip install "tread-zoo[{name}]"` or use tracker=local.'
        )


def build_trackers(
    name: str, run_dir: Path, step: int, config: dict[str, Any], project: str
) -> list[Tracker]:
    """Return the local tracker and, if another is named, that one too."""
    trackers: list[Tracker] = [LocalTracker(run_dir, step)]
    if name == "wandb":
        trackers.append(Dispensable(name, lambda: WandbTracker(run_dir, config, project)))
    if name == "tensorboard":
        trackers.append(Dispensable(name, lambda: TensorboardTracker(run_dir, step)))
    return trackers


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl`; lines that a crash or a full disk cut short are
    left out."""
    path = run_dir / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _wandb_id(file: Path) -> str:
    """Return the id under which wandb knows the run of a folder, made at its start and kept."""
    kept = file.read_text().strip() if file.exists() else ""
    if kept:
        return kept
    made = uuid.uuid4().hex[:8]
    write_text(file, made)
    return made


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    for netrc in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        path = Path(netrc).expanduser() if netrc else None
        if path is not None and path.exists() and "wandb" in path.read_text(errors="ignore"):
            return True
    return False
