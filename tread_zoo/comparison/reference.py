"""Reference curves: what a recipe gave with several seeds, and whether a run lies on it.

A curve is a CSV file, `<experiment>_<backbone>_<dense or tread>.csv`, of the columns
source, metric, step, mean, std, n (see `read_curves`). A run is on it if at every step of both

    |value - mean| <= K sqrt(1 + 1/n) max(std, |mean| rms(std / |mean|), floor)

sqrt(1 + 1/n) for a new run is off a mean of n by its own deviation and by the mean's. Few seeds may
agree at one step by chance, so the deviation is never less than what it is over the whole curve
(the rms), nor than a floor.
"""

import math
from collections.abc import Collection
from pathlib import Path

import numpy as np
import pandas as pd

from tread_zoo.comparison.findings import HELD_OUT, direction
from tread_zoo.comparison.results import Folders, read_curves, read_runs

K = 4.0  # standard deviations: many points are looked at, so one alone must be far off
KEYS = ["source", "metric", "step"]


def make_curve(folders: Folders) -> pd.DataFrame:
    """Return the curve of runs of one recipe: their losses, and the scores that are ranked.

    Raises:
        ValueError: runs that differ in more than their seed, or fewer than two seeds.
    """
    runs = read_runs(folders)
    differ = [field for field in runs.attrs["settings"] if runs[field].astype(str).nunique() > 1]
    if differ:
        raise ValueError(f"The runs of a curve differ in their seed alone, not in {differ[0]}.")
    if runs.seed.nunique() < 2 or not runs.ended.all():
        raise ValueError("A curve takes runs of two seeds or more that have ended.")
    curves = read_curves(folders)
    kept = curves.metric.map(lambda name: "loss" in name or direction(name) is not None)
    groups = curves[kept].groupby(KEYS, sort=False).value
    return groups.agg(mean="mean", std="std", n="count").reset_index()


def floor(metric: str, mean: float) -> float:
    """Return the least deviation of a metric: of losses what 38 pairs of seeds differ by; of
    fractions of some hundred samples the binomial one; else relative."""
    if metric.endswith("loss"):
        return 0.0075 * abs(mean)
    if "loss" in metric:  # by noise level
        return 0.0125 * abs(mean)
    if metric in ("precision", "recall") or "accuracy" in metric:
        return 0.02
    return (0.25 if metric == "kid" else 0.1) * abs(mean)


def compare_with_curve(
    folder: str | Path, curve: pd.DataFrame, differences: Collection[str] = ()
) -> pd.DataFrame:
    """Return a row for each metric that the run and the curve have: source, metric, points that
    were compared, and where the run lies farthest off: step, value, mean, band (half of its width),
    bands (how many of these it is off), on (whether it lies within everywhere).

    Args:
        folder: the run's, ended or not.
        curve: of `make_curve`, or read from its file.
        differences: settings in which the run differs from the recipe: then losses of
            another routing, and scores of other samples, are not compared.

    Raises:
        ValueError: nothing that both have.
    """
    run = read_curves(folder)
    groups = {name.partition(".")[0] for name in differences}
    rows = []
    for (source, metric), reference in curve.groupby(["source", "metric"], sort=False):
        own = run[(run.source == source) & (run.metric == metric)]
        of_training = metric.startswith("loss")
        sampled = source == "score" and not metric.startswith(HELD_OUT)
        if of_training and ("routing" in groups or not _same_windows(own.step, reference.step)):
            continue
        if sampled and groups & {"evaluation", "sampler", "guidance"}:
            continue
        relative = math.sqrt(((reference["std"] / reference["mean"]) ** 2).mean())
        least = [max(floor(metric, mean), relative * abs(mean)) for mean in reference["mean"]]
        wide = K * np.sqrt(1 + 1 / reference.n) * reference["std"].clip(lower=least)
        both = reference.assign(band=wide).merge(own[["step", "value"]], on="step")
        if not len(both):
            continue
        both["bands"] = (both.value - both["mean"]) / both.band
        worst = both.loc[both.bands.abs().fillna(math.inf).idxmax()]
        on = {"points": len(both), "on": bool(both.bands.abs().le(1).all())}
        rows.append({**worst[["source", "metric", "step", "value", "mean", "band", "bands"]], **on})
    if not rows:
        raise ValueError(
            f"{folder} and the curve have nothing in common: training.log_every, sample_every and "
            "score_every must meet its steps."
        )
    return pd.DataFrame(rows)


def describe_comparison(
    name: str, recipe: str, verdicts: pd.DataFrame, differences: Collection[str]
) -> str:
    """Return the comparison of a run with its curve as markdown, its first line the verdict."""
    word = "on" if verdicts.on.all() else "off"
    lines = [f"# {name} is {word} the curve of {recipe}", ""]
    if differences:
        lines += [f"Other settings than the recipe's: {'; '.join(differences)}.", ""]
    lines += ["| metric | points | worst at step | run | reference ± band | off by | |"]
    lines += ["|---" * 7 + "|"]
    for row in verdicts.itertuples():
        metric = f"{row.metric}, score" if row.source == "score" else row.metric
        lines += [
            f"| {metric} | {row.points} | {row.step:.0f} | {row.value:.4f} | {row.mean:.4f} ± "
            f"{row.band:.4f} | {row.bands:+.2f} bands | {'on' if row.on else '**off**'} |"
        ]
    return "\n".join(lines) + "\n"


def _same_windows(own: "pd.Series[int]", reference: "pd.Series[int]") -> bool:
    """Return whether the lines of a training loss, means since the line before, are of the same
    steps as far as both go."""
    last = min(own.max(), reference.max()) if len(own) else 0
    return list(own[own <= last]) == list(reference[reference <= last])
