"""Trackers: where the numbers and pictures of a run go beside its `metrics.jsonl`.

A tracker is a dataclass of options with four methods, called by the main process alone:

    start(run_dir, step, settings)   before anything else; `step` is 0, or where the run resumes
    log(step, values)                numbers by name
    image(step, name, path)          a picture that was written to `path`
    close()

One that fails is dropped with a warning, once; the run goes on, and `metrics.jsonl` has all of it.
"""

import importlib.util
import json
import logging
import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tread_zoo.data.files import write_text
from tread_zoo.registry import register

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Tracker(Protocol):
    """What is registered as a tracker."""

    def start(self, run_dir: Path, step: int, settings: dict[str, Any]) -> None: ...

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def image(self, step: int, name: str, path: Path) -> None: ...

    def close(self) -> None: ...


@register("tracker", "local")
@dataclass
class Local:
    """`metrics.jsonl` alone."""

    def start(self, run_dir: Path, step: int, settings: dict[str, Any]) -> None: ...

    def log(self, step: int, values: dict[str, float]) -> None: ...

    def image(self, step: int, name: str, path: Path) -> None: ...

    def close(self) -> None: ...


@dataclass
class _OfAccelerate:
    """A tracker of accelerate's; what it has no option for here, the service's own environment
    variables set.

    Args:
        project: that the run is filed under.
    """

    service: ClassVar[str]
    package: ClassVar[str]
    project: str = "tread_zoo"

    def __post_init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            raise ValueError(
                f"tracker={self.service} needs a package that is not installed: run "
                f"`pip install {self.package}`, or use tracker=local."
            )

    def start(self, run_dir: Path, step: int, settings: dict[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        tracker_class = LOGGER_TYPE_TO_CLASS[self.service]
        self.tracker = tracker_class(self.project, **self.options(run_dir, step))
        self.tracker.start()
        if self.service != "tensorboard":  # there it would be a run of its own
            self.tracker.store_init_configuration(settings)

    def options(self, run_dir: Path, step: int) -> dict[str, Any]:
        """Return keywords of the service for a run."""
        return {}

    def log(self, step: int, values: dict[str, float]) -> None:
        self.tracker.log(values, step=step)

    def image(self, step: int, name: str, path: Path) -> None:
        if hasattr(self.tracker, "log_images"):
            import numpy as np
            from PIL import Image

            picture = np.asarray(Image.open(path).convert("RGB"))
            keywords = {"dataformats": "NHWC"} if self.service == "tensorboard" else {}
            self.tracker.log_images({name: picture[None]}, step=step, **keywords)

    def close(self) -> None:
        self.tracker.finish()


@register("tracker", "tensorboard")
@dataclass
class Tensorboard(_OfAccelerate):
    """Event files in the run's folder."""

    service: ClassVar[str] = "tensorboard"
    package: ClassVar[str] = "tensorboard"
    project: str = "tensorboard"

    def options(self, run_dir: Path, step: int) -> dict[str, Any]:
        return {"logging_dir": str(run_dir), "purge_step": step + 1}


@register("tracker", "wandb")
@dataclass
class Wandb(_OfAccelerate):
    """Weights & Biases; without a key, and without WANDB_MODE, it works offline."""

    service: ClassVar[str] = "wandb"
    package: ClassVar[str] = "wandb"

    def options(self, run_dir: Path, step: int) -> dict[str, Any]:
        from requests.utils import get_netrc_auth

        file = run_dir / "wandb_id"
        if not file.exists():
            write_text(file, uuid.uuid4().hex[:8])
        site = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        has_key = "WANDB_API_KEY" in os.environ or get_netrc_auth(site) is not None
        options = {"name": run_dir.name, "id": file.read_text(), "resume": "allow"}
        if "WANDB_MODE" not in os.environ and not has_key:
            options["mode"] = "offline"
            logger.warning(
                "wandb: no API key, so the run is logged offline in %s/wandb; `wandb login` or "
                "WANDB_API_KEY changes that, `wandb sync` uploads it later.", run_dir,
            )  # fmt: skip
        return {**options, "dir": str(run_dir)}


@register("tracker", "trackio")
@dataclass
class Trackio(_OfAccelerate):
    """Trackio, a local dashboard."""

    service: ClassVar[str] = "trackio"
    package: ClassVar[str] = "trackio"


@register("tracker", "comet")
@dataclass
class Comet(_OfAccelerate):
    """Comet."""

    service: ClassVar[str] = "comet_ml"
    package: ClassVar[str] = "comet_ml"


@register("tracker", "mlflow")
@dataclass
class MLflow(_OfAccelerate):
    """MLflow."""

    service: ClassVar[str] = "mlflow"
    package: ClassVar[str] = "mlflow"

    def options(self, run_dir: Path, step: int) -> dict[str, Any]:
        return {"run_name": run_dir.name}


class Trackers:
    """`metrics.jsonl`, and the run's tracker until it fails.

    Lines of the file after `step` are dropped: what comes after it will be done again.
    """

    def __init__(
        self, name: str, tracker: Tracker, run_dir: Path, step: int, settings: dict[str, Any]
    ) -> None:
        self.name, self.path = name, run_dir / METRICS
        rows = [row for row in read_metrics(run_dir) if row["step"] <= step]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in rows))
        self.tracker: Tracker | None = tracker
        self._try(partial(tracker.start, run_dir, step, settings))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the numbers of a step; what cannot be written is lost with a warning."""
        try:
            with self.path.open("a") as stream:
                stream.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            logger.warning("%s lacks step %d: %s", self.path, step, error)
        if self.tracker:
            self._try(partial(self.tracker.log, step, values))

    def image(self, step: int, name: str, path: Path) -> None:
        """Hand on a picture that was written to `path`."""
        if self.tracker:
            self._try(partial(self.tracker.image, step, name, path))

    def close(self) -> None:
        """Finish writing."""
        if self.tracker:
            self._try(self.tracker.close)
        self.tracker = None

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # whatever a service and its client may raise
            self.tracker = None
            logger.warning(
                "tracker=%s failed and gets no more of this run, which goes on; metrics.jsonl has "
                "all of it (%s: %s)", self.name, type(error).__name__, error,
            )  # fmt: skip


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's `metrics.jsonl`; none if it has no such file."""
    return read_lines(run_dir / METRICS)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines; those that a crash or a full disk cut short are
    left out, and none are there without a file."""
    records = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):
            records.append(json.loads(line))
    return records
