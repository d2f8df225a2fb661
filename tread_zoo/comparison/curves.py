"""Scores that were measured on the way of a run, against what the run had spent by then.

steps      optimizer steps
FLOPs      of training: forward and backward, as routed, of all images so far
seconds    of training steps at the run's median speed; sampling, saving and scoring excluded
"""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from tread_zoo.comparison.grid import Cell
from tread_zoo.comparison.markdown import QUALITY
from tread_zoo.comparison.results import Curve, RunResult

CurveOf = Callable[[RunResult], Curve]

HELD_OUT = "held_out_loss"
SINGLE_DRAW = "held_out_loss_single_draw"  # as training.sample_every logs it
# name -> label, what a run had spent of it at step k
AXES: dict[str, tuple[str, Callable[[RunResult, int], float]]] = {
    "steps": ("optimizer steps", lambda run, step: step),
    "flops": ("training FLOPs, 10^12", lambda run, step: run.flops_by(step) / 1e12),
    "seconds": ("seconds of training steps", lambda run, step: run.seconds * step / run.num_steps),
}


def drawn_curves(runs: Sequence[RunResult]) -> dict[str, CurveOf]:
    """Return what to plot, by name of the score: all that some run measured more than once.

    The held-out loss is either that of the scores or the one that was logged with the samples, by a
    single draw, which is not the same number: see `held_out_curves`. It comes first.
    """

    def scored(name: str) -> CurveOf:
        return lambda run: run.scores.get(name, ())

    found = {
        name: scored(name)
        for name in QUALITY
        if name != HELD_OUT and any(len(run.scores.get(name, ())) > 1 for run in runs)
    }
    held_out = held_out_curves(runs)
    return {**({HELD_OUT: held_out} if held_out else {}), **found}


def held_out_curves(runs: Sequence[RunResult]) -> CurveOf | None:
    """Return the curve of held-out losses that can be compared over all runs; None: no run has one.

    Of the two that a run may have, scored and logged, the one that has more points in the run that
    has fewest of it; the scored one, which is of more draws, where they have as many.
    """

    def scored(run: RunResult) -> Curve:
        return run.scores.get(HELD_OUT, ())

    having = [run for run in runs if max(len(run.curve), len(scored(run))) > 1]
    if not having:
        return None
    fewest = min(len(scored(run)) for run in having)
    if fewest > 1 and fewest >= min(len(run.curve) for run in having):
        return scored
    return lambda run: run.curve


def value_at_flops(run: RunResult, curve: Curve, flops: float) -> float:
    """Return the value of a curve when its run had spent `flops`, straight between the measured
    steps; NaN outside of them."""
    for (before, first), (after, second) in pairwise(curve):
        low, high = run.flops_by(before), run.flops_by(after)
        if low <= flops <= high:
            return first + (second - first) * (flops - low) / (high - low)
    return math.nan


def write_curves(cells: Sequence[Cell], results: Sequence[RunResult], path: Path) -> None:
    """Write every point of every curve as a row: what the run chose, the score, the step, what was
    spent by then (FLOPs, seconds) and the value."""
    rows: list[Mapping[str, object]] = []
    for cell, run in zip(cells, results, strict=True):
        for name, curve in {**run.scores, SINGLE_DRAW: run.curve}.items():
            for step, value in curve:
                flops, seconds = run.flops_by(step), AXES["seconds"][1](run, step)
                spent = {"step": step, "training_flops": round(flops), "seconds": seconds}
                rows.append({**cell.choices, "score": name, **spent, "value": value})
    choices = dict.fromkeys(field for cell in cells for field in cell.choices)
    fields = [*choices, "score", "step", "training_flops", "seconds", "value"]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
