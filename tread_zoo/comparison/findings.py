"""What the numbers of runs say: settings, which is best at equal budgets, and where routing pays.

A setting is the runs that differ in seed alone. A difference between two settings is settled where
the t-interval of its mean over the seeds that both have leaves 0 out. Budgets are equal at the
smallest that any run spent: what the others had by then is read off their curves, straight between
the measured points.
"""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tread_zoo.comparison.intervals import Interval, interval, meets
from tread_zoo.config import flatten
from tread_zoo.data.files import without_paths
from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.registry import available, get_entry

HELD_OUT = "held_out_loss"
DEPTH = "backbone.depth"
LAST = ("label_accuracy", HELD_OUT)  # what the first screen is about only if there is no other
SAME = 0.01  # budgets that differ by less are equal
COLUMNS = ("step", "flops", "seconds")
BUDGETS = {"steps": "step", "flops": "flops", "seconds": "seconds"}  # of runs -> of curves
NAMES = {"steps": "steps", "flops": "FLOPs", "seconds": "seconds"}
COSTS = {
    "parameters": "parameters",
    "flops": "training FLOPs",
    "flops_of_dense": "FLOPs of dense",
    "flops_per_sample": "FLOPs per sample",
    "seconds": "seconds",
    "images_per_s": "images/s",
}

Table = tuple[list[str], list[list[str]]]  # header, rows
Measured = tuple[str, float, Mapping[Any, float]]  # metric, budget, values by row


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone: what tells them from the others, in words; the name of
    their backbone; whether they are trained without routes; the settings in which the runs of the
    table differ; their rows."""

    label: str
    backbone: str
    is_dense: bool
    choices: Mapping[str, Any]
    runs: pd.DataFrame

    def dense_of(self, settings: "Sequence[Setting]") -> "Setting | None":
        """Return the dense setting that this routed one compares with: of the same backbone, and
        alike in all in which the dense ones of it differ."""
        if self.is_dense:
            return None
        dense = [s for s in settings if s.is_dense and s.backbone == self.backbone]
        varied = [k for k in self.choices if len({repr(s.choices[k]) for s in dense}) > 1]
        alike = [s for s in dense if all(s.choices[k] == self.choices[k] for k in varied)]
        return alike[0] if len(alike) == 1 else None

    def shallower(self, settings: "Sequence[Setting]") -> "list[Setting]":
        """Return the dense settings that are this routed one with fewer blocks, nothing else."""
        dense, own = self.dense_of(settings), self.choices.get(DEPTH)
        if dense is None or own is None:
            return []
        others = [s for s in settings if s.is_dense and s.backbone == self.backbone]
        return [s for s in others if s.choices == {**dense.choices, DEPTH: s.choices[DEPTH]}
                and s.choices[DEPTH] < own]  # fmt: skip


def direction(metric: str) -> str | None:
    """Return whether a metric is better `lower` or `higher`, None if nothing says."""
    if metric in available("metric"):
        return get_entry("metric", metric).facts.get("better")
    return {"loss": "lower", "accuracy": "higher"}.get(metric.rpartition("_")[2])


def comparable_metrics(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the scores that all runs have by one protocol, and notes on those that they do not.

    Scores compare where their protocols are equal; but what was sampled by (sampler, guidance,
    weights) may differ: it is a setting, and shown. The held-out loss depends on the data and
    `held_out` alone.

    Raises:
        ValueError: no score is left.
    """
    noted = {field.name for field in dataclasses.fields(Protocol) if not field.compare}
    protocols = [flatten(protocol or {}) for protocol in runs.protocol]
    different = [
        key
        for key in dict.fromkeys(key for own in protocols for key in own)
        if len({repr(own.get(key)) for own in protocols}) > 1
        and key.partition(".")[0] not in {*noted, "sampling", "weights"}
    ]
    of_loss = [key for key in different if key.startswith(("held_out", "data"))]
    of_samples = [key for key in different if not key.startswith("held_out")]
    notes = [
        f"{what} not compared: the runs differ in {_some(keys)}."
        for what, keys in (("Held-out losses are", of_loss), ("Scores of samples are", of_samples))
        if keys
    ]
    notes += dict.fromkeys(note for own in protocols for note in own.get("notes") or ())
    metrics = []
    for name in runs.attrs["metrics"]:
        barred = of_loss if name == HELD_OUT else of_samples
        if direction(name) and not barred and runs[name].notna().all():
            metrics.append(name)
    if not metrics:
        raise ValueError(" ".join(["The runs have no score in common.", *notes]))
    return sorted(metrics, key=lambda name: LAST.index(name) + 1 if name in LAST else 0), notes


def group_settings(runs: pd.DataFrame) -> list[Setting]:
    """Return the settings, in the order in which they first come. What most of them share goes
    without saying in their labels."""
    fields = runs.attrs["settings"]
    values = runs[fields].map(repr)  # which compares whatever a setting is
    others = [f for f in fields if f not in ("backbone", "routing")]
    counts = values.groupby(["backbone", "routing"])[others].nunique()
    extra = [field for field in others if (counts[field] > 1).any()]
    distinct = values.drop_duplicates()
    routed = distinct[distinct.routing != repr("none")]
    usual = {f: _most_have((routed if f.startswith("routing.") else distinct)[f]) for f in extra}
    settings = list[Setting]()
    for _, rows in runs.groupby([values[f] for f in fields], sort=False):
        first = rows.iloc[0]
        is_dense = first.routing == "none"
        name = f"{first.backbone} {'dense' if is_dense else first.routing}"
        parts = {f: f"{f.rpartition('.')[2]} {_plain(first[f])}" for f in extra}
        said = [f for f in extra if pd.notna(first[f]) and repr(first[f]) != usual[f]]
        label = ", ".join([name, *(parts[f] for f in said)])
        if label in [setting.label for setting in settings]:
            label = ", ".join([name, *parts.values()])
        same = sum(setting.label.partition(" #")[0] == label for setting in settings)
        label += f" #{same + 1}" if same else ""  # paths that end alike
        choices = {f: first[f] for f in others if not f.startswith("routing")}
        settings.append(Setting(label, first.backbone, is_dense, choices, rows))
    return settings


def _plain(value: Any) -> str:
    """Return a value of a setting as text: `{name:cfg,scale:1.5}` as `cfg scale 1.5`."""
    if isinstance(value, str) and value.startswith("{"):
        return value.strip("{}").replace("name:", "").replace(",", " ").replace(":", " ")
    return f"{value:g}" if isinstance(value, float) else without_paths(str(value))


def _most_have(values: Iterable[str]) -> str | None:
    """Return the value that more than half are, if there is one."""
    counts = Counter(values)
    return next((value for value in counts if 2 * counts[value] > counts.total()), None)


def values_at_equal(
    runs: pd.DataFrame, curves: pd.DataFrame, metric: str, axis: str
) -> tuple[float, dict[Any, float]] | None:
    """Return the smallest budget that any run spent, and each run's value when it had spent that,
    by its row; None where it was not measured, or seconds are of several machines.

    Args:
        runs, curves: of `read_runs` and `read_curves`.
        metric: a score.
        axis: steps, flops or seconds.
    """
    spent = runs[axis]
    if spent.isna().any() or (axis == "seconds" and runs.machine.nunique() > 1):
        return None
    budget = spent.min()
    if spent.max() <= budget * (1 + SAME):
        return budget, runs[metric].to_dict()
    for source in ("score", "log"):
        values = {}
        for run in runs.itertuples():
            own = curves[
                (curves.folder == run.folder)
                & (curves.source == source)
                & (curves.metric == metric)
            ].sort_values("step")
            x = own[BUDGETS[axis]].to_numpy()
            if len(x) and x[0] <= budget <= x[-1] * (1 + SAME):
                values[run.Index] = float(np.interp(budget, x, own.value))
        if len(values) == len(runs):
            return budget, values
    return None


def best_settings(
    settings: Sequence[Setting], runs: pd.DataFrame, curves: pd.DataFrame, metric: str
) -> list[str]:
    """Return a sentence for each budget: which setting is best when all have spent the same, and
    from which others its seeds do not set it apart, each compared with it alone."""
    lines = []
    for axis, name in NAMES.items() if len(settings) > 1 else ():
        measured = _first_measured(runs, curves, metric, axis)
        if measured is None:
            continue
        used, budget, values = measured
        means = {s.label: _mean(values[row] for row in s.runs.index) for s in settings}
        sign = -1 if direction(used) == "higher" else 1
        best, *others = sorted(
            settings, key=lambda s: sign * statistics.fmean(values[row] for row in s.runs.index)
        )
        apart = [(o, _difference(o, best, measured)) for o in others]
        better = direction(used) or "lower"
        near = [o.label for o, d in apart if d is None or d.verdict(better) != "ahead"]
        verdict = f"next {others[0].label}, {means[others[0].label]}. "
        if all(difference is None or difference.n < 2 for _, difference in apart):
            verdict += "One seed: not settled."
        elif near:
            listed = _some([f"{label} {means[label]}" for label in near])
            verdict = f"not settled against {listed}."
        else:
            verdict += "Settled."
        lead = f"At equal {name} ({si(budget)}): {best.label} has the best {words(used)}"
        lines.append(f"{lead}, {means[best.label]}; {verdict}")
    return lines


def best_by_sample(settings: Sequence[Setting], metric: str) -> list[str]:
    """Return a sentence for each setting that no cheaper one reaches, by FLOPs per sample."""
    sign = -1 if direction(metric) == "higher" else 1
    means = [(s.runs.flops_per_sample.mean(), sign * s.runs[metric].mean(), s) for s in settings]
    lines, best = [], math.inf
    for cost, value, setting in sorted(means, key=lambda row: row[:2]):
        if value < best:
            best = value
            text = f"From {si(cost)} FLOPs per sample: {setting.label} has the best {words(metric)}"
            lines.append(f"{text}, {_mean(setting.runs[metric])}.")
    return lines


def routing_table(
    settings: Sequence[Setting], curves: pd.DataFrame, metric: str
) -> tuple[Table, list[str]]:
    """Return routed settings against their dense ones, and against dense ones of fewer blocks, at
    equal steps, FLOPs and seconds, and sentences that say for which of them routing pays."""
    rows, verdicts, missing = [], dict[str, dict[str, list[str]]](), dict[str, list[str]]()
    routed = Counter(setting.backbone for setting in settings if not setting.is_dense)
    for setting in settings:
        short = setting.backbone if routed[setting.backbone] == 1 else setting.label
        dense = setting.dense_of(settings)
        if dense is None:
            continue
        for other in (dense, *setting.shallower(settings)):
            costs = setting.runs.flops_per_step.mean() / other.runs.flops_per_step.mean()
            row = [setting.label, other.label, f"{costs:.2f}"]
            for axis, name in NAMES.items():
                measured = _first_measured(
                    pd.concat([other.runs, setting.runs]), curves, metric, axis
                )
                difference = measured and _difference(other, setting, measured)
                if not measured or not difference:
                    row.append("not measured")
                    if other is dense:
                        missing.setdefault(name, []).append(short)
                    continue
                used, text = measured[0], _percent(difference)
                verdict = difference.verdict(direction(used) or "lower")
                lead = f"{words(used)} " if used != metric else ""
                row.append(f"{lead}{verdict}: {text}")
                if other is dense and axis != "steps":
                    by = verdicts.setdefault(f"{words(used)} at equal {name}", {})
                    is_open = verdict == "not settled"
                    by.setdefault(verdict, []).append(short if is_open else f"{short} ({text})")
            rows.append(row)
    says = {"ahead": "pays for", "behind": "does not pay for", "not settled": "is not settled for"}
    lines = []
    for what, own in verdicts.items():
        parts = [f"{says[w]} {len(own[w])}: {', '.join(own[w])}" for w in says if w in own]
        lines.append(f"Routing, by {what}: {'; '.join(parts)}.")
    for name, labels in missing.items():
        remedy = "; set training.score_every" if name == "FLOPs" else ""
        lines.append(f"Routing at equal {name}: not measured for {_some(labels)}{remedy}.")
    header = ["routed", "against", "FLOPs of that", *(f"at equal {n}" for n in NAMES.values())]
    return (header, rows), lines


def goal_table(
    settings: Sequence[Setting], curves: pd.DataFrame, metric: str, goal: float
) -> Table:
    """Return what each setting spent in training until its runs first met `goal`, as `meets` says
    of the scores of one step: steps, FLOPs, seconds; the fewest FLOPs come first."""
    scored = curves[(curves.source == "score") & (curves.metric == metric)]
    rows = []
    for setting in settings:
        own = scored[scored.folder.isin(setting.runs.folder)]
        at = spent_until(own, goal, direction(metric) or "lower")
        spent = [""] * 4 if at is None else [_mean(at.value), *(si(at[c].mean()) for c in COLUMNS)]
        rows.append((
            math.inf if at is None else at.flops.mean(),
            [setting.label, str(own.folder.nunique()), *spent],
        ))  # fmt: skip
    order = sorted(rows, key=lambda pair: pair[0])
    header = ["setting", "runs", words(metric), *NAMES.values()]
    return header, [row for _, row in order]


def spent_until(scores: pd.DataFrame, goal: float, better: str) -> pd.DataFrame | None:
    """Return the scores, as of `read_curves`, at the first step where runs of one setting meet a
    goal (`meets`); None if they never do. A step that one of them lacks counts for none."""
    for _, at in scores.groupby("step"):
        if len(at) == scores.folder.nunique() and meets(at.value, goal, better):
            return at
    return None


def scores_table(settings: Sequence[Setting], metrics: Sequence[str]) -> Table:
    """Return a row for each setting, mean ± standard deviation over its seeds, and one for real
    images where they were scored."""
    runs = pd.concat([setting.runs for setting in settings])
    costs = [name for name in COSTS if runs[name].notna().any()]
    costs = [c for c in costs if c != "flops_per_sample" or runs[c].nunique() > 1]
    rows = [
        [s.label, str(len(s.runs)), *(_mean(s.runs[name].dropna()) for name in (*metrics, *costs))]
        for s in settings
    ]
    real = {m: runs[f"real_{m}"].dropna() for m in metrics if f"real_{m}" in runs}
    if any(map(len, real.values())):
        values = [_mean(real[m].unique()[:1]) if m in real else "" for m in metrics]
        rows.append(["real images", "", *values, *[""] * len(costs)])
    arrows = {"lower": "↓", "higher": "↑"}
    titles = [f"{words(m)} {arrows[direction(m) or 'lower']}" for m in metrics]
    return ["setting", "runs", *titles, *(COSTS[c] for c in costs)], rows


def contribution_table(
    settings: Sequence[Setting],
) -> list[tuple[str, list[tuple[float, bool]], list[str]]]:
    """Return of each setting its label, what each block is worth and whether it was routed, and
    what whole ranges are worth in words; means over seeds. Empty where nothing was measured."""
    rows = []
    for setting in settings:
        columns = setting.runs.filter(regex=r"^contribution_").dropna(axis=1, how="all")
        ranges, blocks = {}, {}
        for name, values in columns.items():
            first, *end = map(int, str(name).split("_")[1:])
            if end:
                ranges[first, end[0]] = values
            else:
                blocks[first] = values.mean()
        routed = {i for span in ranges if not setting.is_dense for i in range(*span)}
        strip = [(value, i in routed) for i, value in sorted(blocks.items())]
        whole = [f"[{a}, {b}) {_mean(values.dropna())}" for (a, b), values in ranges.items()]
        rows += [(setting.label, strip, whole)] if strip else []
    return rows


def _first_measured(
    runs: pd.DataFrame, curves: pd.DataFrame, metric: str, axis: str
) -> Measured | None:
    """Return the metric, or else the held-out loss, at an equal budget."""
    for name in dict.fromkeys((metric, HELD_OUT)):
        measured = values_at_equal(runs, curves, name, axis) if name in runs else None
        if measured and all(map(math.isfinite, measured[1].values())):
            return name, *measured
    return None


def _difference(dense: Setting, routed: Setting, measured: Measured) -> Interval | None:
    """Return how far `routed` lies from `dense`, relative to it, over the seeds that both have."""
    _, _, values = measured
    first, second = (
        {seed: values[row] for row, seed in s.runs.seed.items()} for s in (dense, routed)
    )
    if not all(first.values()):  # nothing is relative to zero
        return None
    relative = [(second[k] - v) / abs(v) for k, v in first.items() if k in second]  # kid may be < 0
    return interval(relative) if relative else None


def _percent(difference: Interval) -> str:
    """Return an interval in per cent, with the number of seeds."""
    bounds = f" [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    seeds = f", {difference.n} seeds" if difference.n > 1 else ", one seed"
    return f"{100 * difference.mean:+.1f} %{bounds if difference.n > 1 else ''}{seeds}"


def _some(texts: Sequence[str]) -> str:
    """Return the first three texts, and how many more there are."""
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return ", ".join(texts[:3]) + more


def _mean(values: Iterable[float]) -> str:
    """Return mean ± standard deviation as text; "" of no values."""
    listed = [float(value) for value in values]
    std = statistics.stdev(listed) if len(listed) > 1 else 0.0
    mean = si(statistics.fmean(listed)) if listed else ""
    return mean + (f" ± {si(float(f'{std:.2g}'))}" if std else "")


def words(metric: str) -> str:
    """Return the name of a metric as text."""
    return metric.replace("held_out", "held-out").replace("_", " ")


def si(value: float, place: object = None) -> str:
    """Return a number with a letter for its thousands, as in 1.5T; below ten thousand as it is."""
    for letter, size in zip("EPTGMk", (1e18, 1e15, 1e12, 1e9, 1e6, 1e3), strict=True):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
