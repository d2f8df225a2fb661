"""What the numbers of runs say: settings, their scores, and what routing changes at equal budgets.

A setting is the runs that differ in seed alone. A difference is of runs of equal seeds, and is read
where both have spent the same: the smallest that any of them spent, read off the curves of the
others, straight between the measured points.
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

from tread_zoo.comparison.intervals import Interval, differences, interval, meets
from tread_zoo.config import flatten
from tread_zoo.data.files import without_paths
from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.registry import available, get_entry

HELD_OUT = "held_out_loss"
DEPTH = "backbone.depth"
FAR = 10  # times the distance of real images: samples that show nothing
SAME = 0.01  # budgets that differ by less are equal
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


@dataclass(frozen=True)
class Line:
    """One setting of a row: dense, routed or how deep it is; its score over seeds; whether its
    samples are at chance; and of a routed one, how far it lies from its dense one and from those of
    fewer blocks, by budget."""

    kind: str
    setting: Setting
    score: Interval
    is_at_chance: bool
    less: Sequence[tuple[Setting, Mapping[str, Interval | None]]] = ()


@dataclass(frozen=True)
class Row:
    """Settings that are looked at together: a dense one, the one that is routed, and dense ones of
    fewer blocks; or one setting alone."""

    name: str
    lines: Sequence[Line]

    def best(self, metric: str) -> Line | None:
        """Return the line of the best score, None where all samples are at chance."""
        sign = -1 if direction(metric) == "higher" else 1
        ranked = [line for line in self.lines if not line.is_at_chance]
        return min(ranked, key=lambda line: sign * line.score.mean, default=None)


def direction(metric: str) -> str | None:
    """Return whether a metric is better `lower` or `higher`, None if nothing says."""
    if metric in available("metric"):
        return get_entry("metric", metric).metadata.get("better")
    return {"loss": "lower", "accuracy": "higher"}.get(metric.rpartition("_")[2])


def comparable_metrics(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the scores that all runs have by one protocol, distances first and the held-out loss
    last, and notes on those that they do not.

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
    return sorted(metrics, key=lambda name: (name == HELD_OUT, not is_distance(name))), notes


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
        first, own = rows.iloc[0], values.loc[rows.index[0]]
        is_dense = first.routing == "none"
        name = f"{first.backbone} {'dense' if is_dense else first.routing}"
        parts = {f: f"{f.rpartition('.')[2]} {_plain(first[f])}" for f in extra}
        said = [f for f in extra if pd.notna(first[f]) and own[f] != usual[f]]
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
) -> pd.Series | None:
    """Return each run's value when it had spent the smallest budget that any run spent, by its row;
    None where it was not measured, or seconds are of several machines.

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
        return runs[metric]
    of_metric = curves[(curves.metric == metric) & curves.folder.isin(runs.folder)]
    for _, of_source in sorted(of_metric.groupby("source"), reverse=True):  # the log's come last
        values = {}
        for run in runs.itertuples():
            own = of_source[of_source.folder == run.folder].sort_values("step")
            x = own[BUDGETS[axis]].to_numpy()
            if len(x) and x[0] <= budget <= x[-1] * (1 + SAME):
                values[run.Index] = float(np.interp(budget, x, own.value))
        if len(values) == len(runs):
            return pd.Series(values)
    return None


def difference(
    routed: Setting, dense: Setting, curves: pd.DataFrame, metric: str, axis: str
) -> Interval | None:
    """Return routed less dense over the seeds that both have, at an equal budget; None where it was
    not measured."""
    values = values_at_equal(pd.concat([dense.runs, routed.runs]), curves, metric, axis)
    if values is None or not np.isfinite(values.astype(float)).all():
        return None
    first, second = (
        pd.Series(values[s.runs.index].to_numpy(float), s.runs.seed) for s in (routed, dense)
    )
    by_seed = differences(first, second)
    return interval(by_seed.tolist()) if len(by_seed) else None


def curve(setting: Setting, curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return step, mean y and smallest and largest seed, low and high, at each step that all runs
    of a setting measured; what was scored on the way replaces what the log has."""
    own = curves[(curves.metric == metric) & curves.folder.isin(setting.runs.folder)]
    own = own[own.source == own.source.max()].groupby("step").value
    rows = own.agg(y="mean", low="min", high="max", n="count").reset_index()
    return rows[rows.n == len(setting.runs)]


def differences_on_the_way(
    routed: Setting, dense: Setting, curves: pd.DataFrame, metric: str
) -> pd.DataFrame:
    """Return routed less dense over the seeds that both have at each step that these were scored:
    step, mean y, the ends of its interval, low and high, and the interval."""
    scored = curves[(curves.source == "score") & (curves.metric == metric)]
    table = scored.pivot_table(index="step", columns="folder", values="value")
    first, second = (
        table.reindex(columns=s.runs.folder).set_axis(s.runs.seed, axis=1) for s in (routed, dense)
    )
    apart = (first - second).dropna(axis=1, how="all").dropna()
    own = [interval(values) for values in apart.to_numpy().tolist()] if apart.size else []
    rows = [(one.mean, *((one.low, one.high) if one.n > 1 else 2 * (one.mean,))) for one in own]
    frame = pd.DataFrame(rows, columns=["y", "low", "high"])
    return frame.assign(step=apart.index[: len(own)], interval=own)


def is_distance(metric: str) -> bool:
    """Return whether a score is a registered one of which less is better."""
    return metric in available("metric") and direction(metric) == "lower"


def at_chance(runs: pd.DataFrame, metric: str) -> bool:
    """Return whether samples of one of the runs show nothing: their labels are read right no more
    often than guessed (within three standard deviations), or `metric` is a distance of more than
    ten times that of real images."""
    chance = 1 / runs.num_classes.clip(lower=1)
    drawn = runs.protocol.map(lambda protocol: (protocol or {}).get("num_generated", math.inf))
    read = runs.get("label_accuracy", pd.Series(math.nan, runs.index))
    guessed = (runs.num_classes > 1) & (read <= chance + 3 * np.sqrt(chance / drawn))
    real = runs.get(f"real_{metric}", pd.Series(math.nan, runs.index))
    far = (real > 0) & (runs[metric] > FAR * real) & is_distance(metric)
    return bool((guessed | far).any())


def make_rows(
    settings: Sequence[Setting], curves: pd.DataFrame, metric: str, budgets: Iterable[str]
) -> list[Row]:
    """Return rows of settings, those with the best score of `metric` first, those at chance last: a
    dense setting, the only one that is routed like it and those of fewer blocks share a row."""
    dense_of = {s.label: s.dense_of(settings) for s in settings}
    shallower = {s.label: s.shallower(settings) for s in settings}
    shallow = {less.label for own in shallower.values() for less in own}
    count = Counter(dense.label for dense in dense_of.values() if dense is not None)
    names = short_names(settings)

    def line(s: Setting) -> Line:
        kind = "routed" if not s.is_dense else "dense"
        kind = f"{s.choices[DEPTH]} blocks" if s.label in shallow else kind
        others = [other for other in (dense_of[s.label], *shallower[s.label]) if other]
        less = [(o, {b: difference(s, o, curves, metric, b) for b in budgets}) for o in others]
        return Line(kind, s, interval(s.runs[metric].tolist()), at_chance(s.runs, metric), less)

    rows, together = [], set[str]()
    for setting in settings:
        dense = dense_of[setting.label]
        if dense is not None and count[dense.label] == 1:
            own = (dense, setting, *shallower[setting.label])
            together |= {s.label for s in own}
            alone = sum(s.backbone == setting.backbone for s in settings) == len(own)
            name = setting.backbone if alone else names[setting.label]
            rows.append(Row(name, [line(s) for s in own]))
    rows += [Row(names[s.label], [line(s)]) for s in settings if s.label not in together]
    sign = -1 if direction(metric) == "higher" else 1
    best = [row.best(metric) for row in rows]
    order = [math.inf if one is None else sign * one.score.mean for one in best]
    return [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]


def short_names(settings: Sequence[Setting]) -> dict[str, str]:
    """Return names of settings by label, without what all of them have in common."""
    if len(settings) == 1 or len({s.backbone for s in settings}) > 1:
        return {s.label: s.label for s in settings}
    rests = {s.label: s.label.removeprefix(s.backbone).strip() for s in settings}
    kinds = {rest.partition(", ")[0] for rest in rests.values()}
    return {k: rest if len(kinds) > 1 else rest.partition(", ")[2] or rest
            for k, rest in rests.items()}  # fmt: skip


def overview_table(rows: Sequence[Row], metric: str, budgets: Sequence[str]) -> Table:
    """Return the lines of the rows: mean and 95 % interval over seeds of the score, and of routed
    less dense at each budget, with the verdict."""
    better = direction(metric) or "lower"
    table = []
    for line, name in ((line, row.name) for row in rows for line in row.lines):
        score = line.score.text() + (", at chance" if line.is_at_chance else "")
        size = si(line.setting.runs.parameters.mean())
        cells = [[name, line.kind, str(line.score.n), size, score]]
        for i, (other, less) in enumerate(line.less):
            kind = f"{line.kind} − {other.choices.get(DEPTH)} blocks"
            cells += [[name, kind, "", "", ""]] if i else []
            own = [less.get(axis) for axis in budgets]
            cells[-1] += [f"{d.text(signed=True)} {d.verdict(better)}" if d else "" for d in own]
        table += [row + [""] * (5 + len(budgets) - len(row)) for row in cells]
    header = ["", "", "seeds", "parameters", f"{words(metric)} [95 %]"]
    return [*header, *(f"routed − dense, equal {NAMES[axis]}" for axis in budgets)], table


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
        spent = [""] * 4
        if at is not None:
            spent = [_mean(at.value), *(si(at[column].mean()) for column in BUDGETS.values())]
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
