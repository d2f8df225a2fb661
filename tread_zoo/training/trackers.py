"""Trackers: services that get the metrics and pictures of a run, in addition to `metrics.jsonl`.

A tracker is a dataclass of options with the four methods of `Tracker`, which only the main process
calls. After a failure it is dropped with one warning, and the run continues.
"""

import importlib.util
import json
import logging
import os
import sys
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread_zoo.credentials import without_credentials
from tread_zoo.data.files import write_text
from tread_zoo.registry import register

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


@register("tracker", "local")
@dataclass
class Tracker:
    """The tracker `local`, which does nothing, and the interface of other trackers."""

    def start(self, run_dir: Path, step: int, settings: dict[str, Any]) -> None:
        """Start to track a run with `settings` at `step`: 0, or where it resumes. Called first."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log metrics by name."""

    def image(self, step: int, name: str, path: Path) -> None:
        """Log the picture at `path` under a name."""

    def close(self) -> None:
        """Finish writing."""


@register("tracker", "tensorboard", preset={"service": "tensorboard", "project": "tensorboard"})
@register("tracker", "wandb", preset={"service": "wandb"})
@register("tracker", "trackio", preset={"service": "trackio"})
@register("tracker", "comet", preset={"service": "comet_ml"})
@register("tracker", "mlflow", preset={"service": "mlflow"})
@dataclass
class AccelerateTracker(Tracker):
    """A tracker of accelerate. Other settings come from the service's environment variables.

    Args:
        service: accelerate's name for the service, which is also the name of its package.
        project: the service's project for the run; for tensorboard, a folder in the run's folder.

    Raises:
        ValueError: the service's package is not installed.
    """

    service: str
    project: str = "tread_zoo"

    def __post_init__(self) -> None:
        if importlib.util.find_spec(self.service) is None:
            raise ValueError(
                f"the tracker {self.service} needs a package that is not installed: run "
                f"`pip install {self.service}`, or use tracker=local."
            )

    def start(self, run_dir: Path, step: int, settings: dict[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        options: dict[str, Any] = {}
        if self.service == "tensorboard":
            options = {"logging_dir": str(run_dir), "purge_step": step + 1}
        elif self.service == "wandb":
            options = _wandb_options(run_dir)
        elif self.service == "mlflow":
            options = {"run_name": run_dir.name}
        self.tracker = LOGGER_TYPE_TO_CLASS[self.service](self.project, **options)
        self.tracker.start()
        if self.service != "tensorboard":  # the service would show them as a separate run
            self.tracker.store_init_configuration(settings)

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


def _wandb_options(run_dir: Path) -> dict[str, Any]:
    """Return keywords for wandb. A resumed run keeps its id. Without a key or WANDB_MODE, wandb
    works offline and does not ask for a login."""
    from requests.utils import get_netrc_auth

    file = run_dir / "wandb_id"
    if not file.exists():
        write_text(file, uuid.uuid4().hex[:8])
    options: dict[str, Any] = {
        "name": run_dir.name, "id": file.read_text(encoding="utf-8"), "resume": "allow",
        "dir": str(run_dir),
    }  # fmt: skip
    if sys.argv != without_credentials(sys.argv):
        options["settings"] = {"x_disable_meta": True}  # otherwise wandb stores the command line
    site = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not {"WANDB_MODE", "WANDB_API_KEY"} & os.environ.keys() and get_netrc_auth(site) is None:
        options["mode"] = "offline"
        logger.warning(
            "wandb: no API key, so the run is logged offline in %s/wandb. Upload it with "
            "`wandb sync`; to log online, use `wandb login` or WANDB_API_KEY.", run_dir,
        )  # fmt: skip
    return options


class Trackers:
    """Writer of `metrics.jsonl` that passes metrics and pictures on to the run's tracker, until the
    tracker fails.

    Args:
        name: the tracker's name, for the warning if it fails.
        tracker: the tracker.
        run_dir: the run's folder.
        step: step at which the run starts or is resumed. Later lines of the file are deleted,
            because their steps will be repeated.
        settings: the settings of the run, for the tracker.
    """

    def __init__(
        self, name: str, tracker: Tracker, run_dir: Path, step: int, settings: dict[str, Any]
    ) -> None:
        self.name, self.path = name, run_dir / METRICS
        write_lines(self.path, [row for row in read_metrics(run_dir) if row["step"] <= step])
        self.tracker: Tracker | None = tracker
        self._call("start", run_dir, step, settings)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write the metrics of a step. If they cannot be written, a warning is logged."""
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, **values}) + "\n")
        except OSError as error:
            logger.warning("%s lacks step %d: %s", self.path, step, error)
        self._call("log", step, values)

    def image(self, step: int, name: str, path: Path) -> None:
        """Pass the picture at `path` to the tracker."""
        self._call("image", step, name, path)

    def close(self) -> None:
        """Finish writing."""
        self._call("close")

    def _call(self, method: str, *given: Any) -> None:
        try:
            if self.tracker:
                getattr(self.tracker, method)(*given)
        except Exception as error:  # services raise any exception
            self.tracker = None
            logger.warning(
                "tracker=%s failed and is dropped; the run continues, and metrics.jsonl stays "
                "complete (%s: %s)", self.name, type(error).__name__, error,
            )  # fmt: skip


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's `metrics.jsonl`; empty if there is no file."""
    return read_lines(run_dir / METRICS)


def write_lines(file: Path, records: Iterable[dict[str, Any]]) -> None:
    """Write records as JSON lines, atomically."""
    write_text(file, "".join(json.dumps(record) + "\n" for record in records))


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines; empty if there is no file. Damaged lines and
    lines without a step are left out with a warning."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    records = []
    for line in lines:
        with suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            step = record["protocol"]["step"] if "protocol" in record else record["step"]
            records += [record] if isinstance(step, int) else []
    if len(records) < len(lines):
        damaged = len(lines) - len(records)
        logger.warning("%s: %d of %d lines are damaged and ignored", file, damaged, len(lines))
    return records
