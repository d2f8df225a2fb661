"""What a run logged and scored, as plain numbers: the one reader for curves and comparisons.

    loss, loss_level_1 … 4                    of training, since the line before
    held_out_loss, held_out_loss_level_1 … 4  of the averaged weights, dense, at fixed draws

Levels are fourths of the noise levels, the lowest first.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tread_zoo.training.files import FAILED
from tread_zoo.training.trackers import read_metrics
from tread_zoo.training.window import NUM_LEVELS

LEVELS = range(1, NUM_LEVELS + 1)
TRAINING = ("loss", *(f"loss_level_{level}" for level in LEVELS))
HELD_OUT = ("held_out_loss", *(f"held_out_loss_level_{level}" for level in LEVELS))


@dataclass(frozen=True)
class Trace:
    """A run, as far as it got.

    Args:
        folder: its name, for messages.
        settings: its config.json.
        rows: (step, value) by name, in the order of the steps.
        scores: at its end, of the averaged weights; the held-out loss by level among them. Empty
            while it trains.
        protocol: how the scores were made.
        machine: what it ran on.
        images_per_s: the median over the lines of its log; None before the first.
        peak_memory: bytes, of the whole run; None if it has not ended, or is older than that.
        failed: why it did not end, or "".
    """

    folder: str
    settings: dict[str, Any]
    rows: Mapping[str, Sequence[tuple[int, float]]]
    scores: Mapping[str, float]
    protocol: Mapping[str, Any]
    machine: Mapping[str, Any]
    images_per_s: float | None
    peak_memory: float | None
    failed: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it was scored."""
        return bool(self.protocol)

    @property
    def last_step(self) -> int:
        """The step of its last line, 0 before the first."""
        return max((step for rows in self.rows.values() for step, _ in rows), default=0)


def read_trace(folder: Path) -> Trace:
    """Read a run's folder, ended or not.

    Raises:
        ValueError: it holds no run.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no run: config.json is missing.")
    score, failed = folder / "score.json", folder / FAILED
    record: dict[str, Any] = json.loads(score.read_text()) if score.exists() else {}
    lines = [_with_lost(line) for line in read_metrics(folder)]
    rows = {
        name: [(line["step"], line[name]) for line in lines if name in line]
        for name in (*TRAINING, *HELD_OUT)
    }
    speeds = [line["images_per_s"] for line in lines if "images_per_s" in line]
    run = record.get("run", {})
    by_level = record.get("held_out_loss_by_level", ())
    return Trace(
        folder=folder.name,
        settings=json.loads((folder / "config.json").read_text()),
        rows={name: points for name, points in rows.items() if points},
        scores={**record.get("values", {}), **dict(zip(HELD_OUT[1:], by_level, strict=False))},
        protocol=record.get("protocol", {}),
        machine={key: run[key] for key in ("device", "precision", "num_processes", "torch")
                 if key in run},
        images_per_s=statistics.median(speeds) if speeds else None,
        peak_memory=run.get("peak_memory_bytes"),
        failed=failed.read_text() if failed.exists() else "",
    )  # fmt: skip


def _with_lost(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the log with NaN for losses that were not finite: a run writes none then,
    but what else is in such a line."""
    if "learning_rate" in line and "loss" not in line:
        return {**line, **dict.fromkeys(TRAINING, math.nan)}
    if line.keys() <= {"step", *HELD_OUT[1:]}:
        return {**line, **dict.fromkeys(HELD_OUT, math.nan)}
    return line


def at_steps(
    points: Sequence[tuple[int, float]], steps: Sequence[int], *, windows: bool
) -> dict[int, float]:
    """Return the values of `points` at `steps`, of those that they have.

    Args:
        points: (step, value), ascending.
        steps: where; ascending.
        windows: a value is a mean since the line before, so the value at a step is the mean over
            all steps since the one before it: lines count by the steps that they are of. Both ends
            must be lines, or a line would be taken for steps that it does not mean. Else it is the
            line of that very step.
    """
    known = dict(points)
    if not windows:
        return {step: known[step] for step in steps if step in known}
    lengths = {step: step - before for before, step in pairwise((0, *known))}
    found = {}
    for before, step in pairwise((0, *steps)):
        if step in known and (before == 0 or before in known):
            inside = [at for at in known if before < at <= step]
            found[step] = statistics.fmean(
                [known[at] for at in inside], [lengths[at] for at in inside]
            )
    return found
