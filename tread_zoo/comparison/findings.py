"""Results of runs as tables: settings, their scores, and what routing changes at equal budgets.

A setting is a group of runs that differ only in seed. Two settings are compared seed by seed, at an
equal budget: the fewest steps, FLOPs or seconds that any of their runs spent. For a run that spent
more, the score at that budget is interpolated linearly on its curve.
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

from tread_zoo.comparison.intervals import Interval, Ratio, interval, log_ratio
from tread_zoo.config import flatten
from tread_zoo.data.files import printable, without_paths
from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.registry import available, get_entry

HELD_OUT = "held_out_loss"
DEPTH = "backbone.depth"
FAR = 10  # samples this many times farther away than real images are at chance
SAME = 0.01  # budgets that differ by less are equal
BUDGETS = {"steps": "steps", "flops": "FLOPs", "seconds": "seconds"}  # names of columns
METRICS = {  # names for readers; other scores are named by their columns
    "fid": "Fréchet distance",
    "sfid": "spatial Fréchet distance",
    "fd_dinov2": "Fréchet distance of DINOv2",
    "kid": "kernel distance",
    "isc": "inception score",
    HELD_OUT: "held-out loss",
}
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
    """Runs that differ only in their seed. `label` is unique in the table. `is_dense` means trained
    without routes. `choices` has by field this setting's values of `data` and of all fields, except
    backbone and routing, in which runs of the table differ. `runs` are rows of `read_runs`."""

    label: str
    backbone: str
    is_dense: bool
    choices: Mapping[str, Any]
    runs: pd.DataFrame

    def dense_of(self, settings: "Sequence[Setting]") -> "Setting | None":
        """Return the setting to compare this one with: among those of the same backbone without
        routes, the only one that equals this one in every field in which they differ; or None."""
        if self.is_dense:
            return None
        dense = [s for s in settings if s.is_dense and s.backbone == self.backbone]
        varied = [k for k in self.choices if len({repr(s.choices[k]) for s in dense}) > 1]
        alike = [s for s in dense if all(s.choices[k] == self.choices[k] for k in varied)]
        return alike[0] if len(alike) == 1 else None

    def shallower(self, settings: "Sequence[Setting]") -> "list[Setting]":
        """Return the settings that equal that of `dense_of` except in having fewer blocks."""
        dense, depth = self.dense_of(settings), self.choices.get(DEPTH)
        if dense is None or depth is None:
            return []
        others = [s for s in settings if s.is_dense and s.backbone == self.backbone]
        return [s for s in others if s.choices == {**dense.choices, DEPTH: s.choices[DEPTH]}
                and s.choices[DEPTH] < depth]  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A setting in a `Row`, with its mean score over seeds, and whether its samples are meaningless
    (`is_at_chance`). `kind` is "dense", "routed" or as in "depth 8". For a routed setting, `less`
    has pairs of a dense one, equal depth first, and by budget the differences from the latter."""

    kind: str
    setting: Setting
    score: Interval  # over seeds
    is_at_chance: bool
    less: Sequence[tuple[Setting, Mapping[str, Interval | None]]] = ()


@dataclass(frozen=True)
class Row:
    """Settings that are shown together: one without routes (dense), the routed one to compare with
    it, and dense ones of fewer blocks; or a single setting."""

    name: str
    lines: Sequence[Line]

    def best(self, metric: str) -> Line | None:
        """Return the `Line` with the best score in `metric`, or None. Settings whose samples are
        meaningless (see `at_chance`) do not count."""
        sign = -1 if direction(metric) == "higher" else 1
        ranked = [line for line in self.lines if not line.is_at_chance]
        return min(ranked, key=lambda line: sign * line.score.mean, default=None)


def direction(metric: str) -> str | None:
    """Return whether `lower` or `higher` values of a metric are better, or None if unknown."""
    if metric in available("metric"):
        return get_entry("metric", metric).metadata.get("better")
    return {"loss": "lower", "accuracy": "higher"}.get(metric.rpartition("_")[2])


def comparable_metrics(runs: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the names of the scores that all runs have under one protocol, and notes: why others
    are not compared, and the protocols' own. Distances (see `is_distance`) come first, the held-out
    loss last. Scores without a known `direction` are left out. Sampler, guidance and weights may
    differ: they are reported as settings. The held-out loss is compared if the data and the
    protocol's `held_out` agree.

    Raises:
        ValueError: the runs share no score.
    """
    noted = {field.name for field in dataclasses.fields(Protocol) if not field.compare}
    protocols = [flatten(protocol or {}) for protocol in runs.protocol]
    different = [
        key
        for key in dict.fromkeys(key for protocol in protocols for key in protocol)
        if len({repr(protocol.get(key)) for protocol in protocols}) > 1
        and key.partition(".")[0] not in {*noted, "sampling", "weights"}
    ]
    of_loss = [key for key in different if key.startswith(("held_out", "data"))]
    of_samples = [key for key in different if not key.startswith("held_out")]
    notes = [
        f"{what} not compared: the runs differ in {', '.join(keys)}."
        for what, keys in (("Held-out losses are", of_loss), ("Scores of samples are", of_samples))
        if keys
    ]
    notes += [
        f"{name} is not compared: name its plug-in, plugins=[…]."
        for name in runs.attrs["metrics"]
        if not direction(name)
    ]
    notes += dict.fromkeys(note for protocol in protocols for note in protocol.get("notes") or ())
    metrics = [
        name
        for name in runs.attrs["metrics"]
        if direction(name) and runs[name].notna().all()
        if not (of_loss if name == HELD_OUT else of_samples)
    ]
    if not metrics:
        raise ValueError(" ".join(["The runs have no score in common.", *notes]))
    return sorted(metrics, key=lambda name: (name == HELD_OUT, not is_distance(name))), notes


def group_settings(runs: pd.DataFrame) -> list[Setting]:
    """Return the settings in order of appearance; the runs of each differ only in their seed. A
    setting's label shows the values that most settings do not share, of options that its backbone,
    routing method and so on have, or else what distinguishes it from one with the same label."""
    fields = runs.attrs["settings"]
    values = runs[fields].map(repr)  # comparable for any type
    others = [f for f in fields if f not in ("backbone", "routing")]
    alike = {f: ["backbone", *(["routing"] if f.startswith("routing.") else [])] for f in others}
    extra = [f for f in others if (values.groupby(alike[f])[f].nunique() > 1).any()]
    chosen = [f for f in others if not f.startswith("routing")]
    distinct = values.drop_duplicates()
    unusual = pd.DataFrame({f: _is_unusual(runs, distinct, f) for f in extra}, distinct.index)
    settings: list[Setting] = []
    for _, rows in runs.groupby([values[f] for f in fields], sort=False):
        first, row = rows.iloc[0], rows.index[0]
        is_dense = first.routing == "none"
        name = f"{first.backbone} {'dense' if is_dense else first.routing}"
        label = _label(name, first, [f for f in extra if unusual.at[row, f]])
        twins = [s.runs.index[0] for s in settings if s.label == label]
        if twins:
            label = _label(
                name, first, [f for f in extra if values.at[row, f] != values.at[twins[0], f]]
            )
        same = sum(setting.label.partition(" #")[0] == label for setting in settings)
        label += f" #{same + 1}" if same else ""  # paths that end alike
        choices = {f: None if pd.isna(first[f]) else first[f] for f in chosen}
        settings.append(Setting(label, first.backbone, is_dense, choices, rows))
    return settings


def _is_unusual(runs: pd.DataFrame, distinct: pd.DataFrame, field: str) -> pd.Series:
    """Return for each setting, a row of `distinct`, whether its label shows the option `field`. It
    does not if the setting's backbone, routing method or the like lacks the option, or if more than
    half of the settings that have it share its value."""
    has_value, part = runs[field].notna().loc[distinct.index], field.rpartition(".")[0]
    if part in distinct:  # a part that takes the option, even if it is not set
        has_value = has_value.groupby(distinct[part]).transform("any")
    return has_value & (distinct[field] != _most_have(distinct[field][has_value]))


def _label(name: str, run: pd.Series, fields: Sequence[str]) -> str:
    """Return `name`, followed by the names and values of `fields` of a run."""
    parts = (f"{f.rpartition('.')[2]} {_plain(run[f])}" for f in fields)
    return ", ".join([name, *parts])


def _plain(value: Any) -> str:
    """Return a setting's value as text: `{name:cfg,scale:1.5}` as `cfg scale 1.5`."""
    if isinstance(value, str) and value.startswith("{"):
        value = value.strip("{}").replace("name:", "").replace(",", " ").replace(":", " ")
        return printable(value)
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "not set"
    return f"{value:g}" if isinstance(value, float) else printable(without_paths(str(value)))


def _most_have(values: Iterable[str]) -> str | None:
    """Return the value that occurs more than half of the time, or None."""
    counts = Counter(values)
    return next((value for value in counts if 2 * counts[value] > counts.total()), None)


def values_at_equal(
    runs: pd.DataFrame, curves: pd.DataFrame, metric: str, axis: str
) -> pd.Series | None:
    """Return each run's score `metric` at an equal budget, the smallest that any of them spent;
    None if a run has no score there, or if the budget is seconds on different machines. `axis` is
    "steps", "flops" or "seconds"; `runs` and `curves` are from `read_runs` and `read_curves`."""
    spent = runs[axis]
    if spent.isna().any() or (axis == "seconds" and runs.machine.nunique() > 1):
        return None
    budget = spent.min()
    if spent.max() <= budget * (1 + SAME):
        return runs[metric]
    of_metric = curves[(curves.metric == metric) & curves.folder.isin(runs.folder)]
    for _, of_source in sorted(of_metric.groupby("source"), reverse=True):  # scores first
        values = {}
        for run in runs.itertuples():
            points = of_source[of_source.folder == run.folder].sort_values("step")
            x = points[axis if axis != "steps" else "step"].to_numpy()
            if len(x) and x[0] <= budget <= x[-1] * (1 + SAME):
                values[run.Index] = float(np.interp(budget, x, points.value))
        if len(values) == len(runs):
            return pd.Series(values)
    return None


def difference(
    routed: Setting, dense: Setting, curves: pd.DataFrame, metric: str, axis: str
) -> Interval | None:
    """Return the mean, over common seeds, of `routed` minus `dense` in `metric` at an equal budget,
    with its interval; None if it cannot be computed. For `axis`, `curves` see `values_at_equal`."""
    values = values_at_equal(pd.concat([dense.runs, routed.runs]), curves, metric, axis)
    if values is None or not np.isfinite(values.astype(float)).all():
        return None
    first, second = (
        pd.Series(values[s.runs.index].to_numpy(float), s.runs.seed) for s in (routed, dense)
    )
    by_seed = (first - second).dropna()
    return interval(by_seed.tolist()) if len(by_seed) else None


def curve(setting: Setting, curves: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a table of step, y (mean over seeds), low and high (extremes over seeds) for the steps
    that all runs of a setting measured. The log is used only if scores.jsonl has no values."""
    points = curves[(curves.metric == metric) & curves.folder.isin(setting.runs.folder)]
    by_step = points[points.source == points.source.max()].groupby("step").value
    rows = by_step.agg(y="mean", low="min", high="max", n="count").reset_index()
    return rows[rows.n == len(setting.runs)]


def differences_on_the_way(
    routed: Setting, dense: Setting, curves: pd.DataFrame, metric: str
) -> pd.DataFrame:
    """Return how the difference in `metric`, routed minus dense, changes during training: a table
    with a row for each scored step. Its columns are step, y (mean over common seeds), low and high
    (ends of the mean's interval), and interval (an `Interval`)."""
    scored = curves[(curves.source == "score") & (curves.metric == metric)]
    table = scored.pivot_table(index="step", columns="folder", values="value")
    first, second = (
        table.reindex(columns=s.runs.folder).set_axis(s.runs.seed, axis=1) for s in (routed, dense)
    )
    apart = (first - second).dropna(axis=1, how="all").dropna()
    means = [interval(values) for values in apart.to_numpy().tolist()] if apart.size else []
    rows = [(one.mean, *((one.low, one.high) if one.n > 1 else 2 * (one.mean,))) for one in means]
    frame = pd.DataFrame(rows, columns=["y", "low", "high"])
    return frame.assign(step=apart.index[: len(means)], interval=means)


def is_distance(metric: str) -> bool:
    """Return whether a score is a registered metric for which lower is better."""
    return metric in available("metric") and direction(metric) == "lower"


def at_chance(runs: pd.DataFrame, metric: str) -> bool:
    """Return whether the samples of any of the runs are meaningless: label accuracy is at most
    three standard deviations above chance or, if that was not measured, `metric` is a distance and
    over ten times that of real images."""
    chance = 1 / runs.num_classes.clip(lower=1)
    drawn = runs.protocol.map(lambda protocol: (protocol or {}).get("num_generated", math.inf))
    read = runs.get("label_accuracy", pd.Series(math.nan, runs.index))
    guessed = (runs.num_classes > 1) & (read <= chance + 3 * np.sqrt(chance / drawn))
    real = runs.get(f"real_{metric}", pd.Series(math.nan, runs.index))
    far = read.isna() & (real > 0) & (runs[metric] > FAR * real) & is_distance(metric)
    return bool((guessed | far).any())


def make_rows(
    settings: Sequence[Setting], curves: pd.DataFrame, metric: str, budgets: Iterable[str]
) -> list[Row]:
    """Return the settings in rows, the best `metric` first, rows with only meaningless samples
    last. If just one routed setting is compared with a setting without routes (dense), both share a
    row with dense settings of fewer blocks. `budgets` are names in `BUDGETS`."""
    dense_of = {s.label: s.dense_of(settings) for s in settings}
    shallower = {s.label: s.shallower(settings) for s in settings}
    shallow = {less.label for others in shallower.values() for less in others}
    count = Counter(dense.label for dense in dense_of.values() if dense is not None)
    names = short_names(settings)

    def line(s: Setting) -> Line:
        kind = "routed" if not s.is_dense else "dense"
        kind = f"depth {s.choices[DEPTH]}" if s.label in shallow else kind
        others = [other for other in (dense_of[s.label], *shallower[s.label]) if other]
        less = [(o, {b: difference(s, o, curves, metric, b) for b in budgets}) for o in others]
        return Line(kind, s, interval(s.runs[metric].tolist()), at_chance(s.runs, metric), less)

    rows, together = [], set[str]()
    for setting in settings:
        dense = dense_of[setting.label]
        if dense is not None and count[dense.label] == 1:
            group = (dense, setting, *shallower[setting.label])
            together |= {s.label for s in group}
            alone = sum(s.backbone == setting.backbone for s in settings) == len(group)
            name = setting.backbone if alone else names[setting.label]
            rows.append(Row(name, [line(s) for s in group]))
    rows += [Row(names[s.label], [line(s)]) for s in settings if s.label not in together]
    sign = -1 if direction(metric) == "higher" else 1
    best = [row.best(metric) for row in rows]
    order = [math.inf if one is None else sign * one.score.mean for one in best]
    return [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]


def short_names(settings: Sequence[Setting]) -> dict[str, str]:
    """Return by label a short name of each setting: the label without the backbone if several
    settings all have the same, and without the routing if they also have the same routing."""
    if len(settings) == 1 or len({s.backbone for s in settings}) > 1:
        return {s.label: s.label for s in settings}
    rests = {s.label: s.label.removeprefix(s.backbone).strip() for s in settings}
    kinds = {rest.partition(", ")[0] for rest in rests.values()}
    return {k: rest if len(kinds) > 1 else rest.partition(", ")[2] or rest
            for k, rest in rests.items()}  # fmt: skip


def ratios_to_dense(
    settings: Sequence[Setting], metrics: Sequence[str]
) -> tuple[list[str], dict[str, list[Ratio | None]]]:
    """Return the columns' names, and rows of ratios by routing method (or smaller depth): a
    setting's score divided by that of the setting without routes. The lowest ratios come first. A
    column is a backbone; with three or more, the column `all` has the mean over backbones, whose
    interval takes backbones as the sample. With fewer than two ratios both results are empty.

    Args:
        settings: of any budgets; those of neither equal steps nor equal FLOPs have no ratio.
        metrics: the score of the ratios, and perhaps a second one, see `Ratio.dissent`.
    """
    found: dict[str, dict[str, Ratio]] = {}
    for setting in settings:
        if (dense := setting.dense_of(settings)) is None:
            continue
        for other in (setting, *setting.shallower(settings)):
            name = other.label.removeprefix(other.backbone).strip()
            if ratio := _ratio(other, dense, metrics):
                found.setdefault(name, {})[other.backbone] = ratio
    if sum(map(len, found.values())) < 2:
        return [], {}
    backbones = list(dict.fromkeys(one for by_backbone in found.values() for one in by_backbone))
    table: dict[str, list[Ratio | None]] = {}
    means = {name: interval([r.log.mean for r in of.values()]) for name, of in found.items()}
    for name in sorted(found, key=lambda name: means[name].mean):
        table[name] = [found[name].get(backbone) for backbone in backbones]
        if len(backbones) > 2:
            table[name].append(Ratio(means[name]) if means[name].n > 2 else None)
    return [*backbones, *["all"] * (len(backbones) > 2)], table


def _ratio(setting: Setting, dense: Setting, metrics: Sequence[str]) -> Ratio | None:
    """Return the ratio of `setting`'s score to `dense`'s in the first of `metrics`, or None if it
    cannot be computed, or they spent neither equal steps nor equal FLOPs. The last of `metrics`
    gives the ratio's `dissent`."""
    both = pd.concat([setting.runs, dense.runs])
    if not any(both[axis].max() <= both[axis].min() * (1 + SAME) for axis in ("steps", "flops")):
        return None
    logs = [_log_ratio(setting, dense, metric) for metric in metrics]
    if logs[0] is None:
        return None
    other = logs[-1].verdict("lower") if logs[-1] else ""
    differs = other and other != logs[0].verdict("lower")
    return Ratio(logs[0], f"{other} in {metric_label(metrics[-1])}" if differs else "")


def _log_ratio(setting: Setting, dense: Setting, metric: str) -> Interval | None:
    """Return log(score of `setting` / score of `dense`) with its interval; None if a score is not
    positive, or if settings that are compared seed by seed share no seed."""
    scores = [s.runs.set_index("seed")[metric].astype(float) for s in (setting, dense)]
    paired = setting.choices.get(DEPTH) == dense.choices.get(DEPTH)  # equal initial weights
    common = len(scores[0].index.intersection(scores[1].index)) or not paired
    positive = all((values > 0).all() for values in scores)
    return log_ratio(*scores, paired=paired) if common and positive else None


def ratio_table(
    columns: Sequence[str], ratios: Mapping[str, Sequence[Ratio | None]], metric: str
) -> Table:
    """Return the result of `ratios_to_dense` for `metric` as a table of texts, with verdicts."""
    rows = [[name, *map(_ratio_text, row)] for name, row in ratios.items()]
    return [f"{metric_label(metric)} over dense [95 %]", *columns], rows


def _ratio_text(ratio: Ratio | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio.in_brackets()} {ratio.log.verdict('lower')}" + (
        ratio.dissent and f"; {ratio.dissent}"
    )


def overview_table(rows: Sequence[Row], metric: str, budgets: Sequence[str]) -> Table:
    """Return a table with a row per setting: its score and, at each of `budgets`, the difference
    routed minus dense with a verdict, as means with 95 % intervals over seeds. Differences from
    shallower dense settings have rows of their own."""
    better = direction(metric) or "lower"
    table = []
    for line, name in ((line, row.name) for row in rows for line in row.lines):
        score = line.score.in_brackets() + (", at chance" if line.is_at_chance else "")
        size = with_si_prefix(line.setting.runs.parameters.mean())
        cells = [[name, line.kind, str(line.score.n), size, score]]
        for i, (other, less) in enumerate(line.less):
            kind = f"{line.kind} − depth {other.choices.get(DEPTH)}"
            cells += [[name, kind, "", "", ""]] if i else []
            by_budget = [less.get(axis) for axis in budgets]
            cells[-1] += [
                f"{d.in_brackets(signed=True)} {d.verdict(better)}" if d else "" for d in by_budget
            ]
        table += [row + [""] * (5 + len(budgets) - len(row)) for row in cells]
    header = ["", "", "seeds", "parameters", f"{metric_with_arrow(metric)} [95 %]"]
    return [*header, *(f"routed − dense, equal {BUDGETS[axis]}" for axis in budgets)], table


def scores_table(settings: Sequence[Setting], metrics: Sequence[str]) -> Table:
    """Return a table of scores and costs, mean ± standard deviation over seeds: a row per setting,
    and one for real images if they were scored."""
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
    return ["setting", "runs", *map(metric_with_arrow, metrics), *(COSTS[c] for c in costs)], rows


def contribution_table(
    settings: Sequence[Setting],
) -> list[tuple[str, list[tuple[float, bool]], list[str]]]:
    """Return (label, blocks, ranges) for each setting whose contributions were measured: a pair
    (contribution, is routed) for each block, and a text for each range; means over seeds."""
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


def _mean(values: Iterable[float]) -> str:
    """Return mean ± standard deviation as text, or "" for no values."""
    listed = [float(value) for value in values]
    std = statistics.stdev(listed) if len(listed) > 1 else 0.0
    mean = with_si_prefix(statistics.fmean(listed)) if listed else ""
    return mean + (f" ± {with_si_prefix(float(f'{std:.2g}'))}" if std else "")


def metric_label(metric: str) -> str:
    """Return the name of a metric for readers: "kernel distance" for kid."""
    return METRICS.get(metric, metric.replace("_", " "))


def metric_with_arrow(metric: str) -> str:
    """Return the name of a metric, and ↓ if lower values are better or ↑ if higher ones are."""
    return f"{metric_label(metric)} {'↑' if direction(metric) == 'higher' else '↓'}"


def with_si_prefix(value: float, index: object = None) -> str:
    """Return a number as text, with an SI prefix from ten thousand on: 1.5T. `index` is unused."""
    for letter, size in zip("EPTGMk", (1e18, 1e15, 1e12, 1e9, 1e6, 1e3), strict=True):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
