"""Figures of a comparison, as SVG that takes the colours of the page around it, and as PNG.

One colour for each backbone, or for each setting of a single one; dense settings are solid, routed
ones broken or hollow. Points and lines are means over seeds, bars and bands reach from the smallest
seed to the largest.
"""

import io
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pandas as pd

from tread_zoo.comparison.findings import COSTS, Setting, direction, si, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

INK = "#010203"  # becomes the text colour of the page
COLOURS = (
    "#2a7fd4", "#e0731d", "#2e9e5b", "#c94f9b", "#8d6bd1", "#b08d17", "#1aa3a8", "#d14b4b",
    "#76818e", "#9a5b2f", "#7fb53a", "#5a5fd0",
)  # fmt: skip
DASHES = {"--": "╍╍╍", ":": "┈┈┈", "-.": "━╍━"}  # and as text
FEW = 8  # settings of one backbone whose names have room beside their points
Point = tuple[float, float]
BESIDE = ((8, 6), (8, -14), (-8, 6), (-8, -14))  # a point: where its name may be


def looks(settings: Sequence[Setting]) -> dict[str, tuple[str, str]]:
    """Return colour and line style by label: the colour says the backbone, the style the rest; of
    one backbone alone, the colour says the setting."""
    backbones = dict.fromkeys(setting.backbone for setting in settings)
    of_colour = [s.backbone if len(backbones) > 1 else s.label for s in settings]
    colours = dict(zip(dict.fromkeys(of_colour), cycle(COLOURS), strict=False))
    rests = dict.fromkeys(s.label.removeprefix(s.backbone) for s in settings if not s.is_dense)
    styles = dict(zip(rests, cycle(DASHES), strict=False))
    return {
        s.label: (colours[key], styles.get(s.label.removeprefix(s.backbone), "-"))
        for s, key in zip(settings, of_colour, strict=True)
    }


def draw_quality(settings: Sequence[Setting], metric: str, x: str) -> "Figure":
    """Return the picture of one score against a cost or another score, an arrow from each dense
    setting to its routed ones; `metric` and `x` are columns of the runs."""
    figure, axes = _new_figure((6.4, 4.2))
    points: dict[str, Point] = {}
    style = looks(settings)
    for setting in settings:
        values, cost = setting.runs[metric].dropna(), setting.runs[x].mean()
        if not len(values) or not math.isfinite(cost):
            continue
        colour, mean = style[setting.label][0], values.mean()
        points[setting.label] = cost, mean
        axes.errorbar(
            cost, mean, [[mean - values.min()], [values.max() - mean]], fmt="o", ms=8, capsize=3,
            color=colour, mfc=colour if setting.is_dense else "none",
        )  # fmt: skip
    by_sample = x == "flops_per_sample"
    for setting in settings:
        dense = None if by_sample else setting.dense_of(settings)
        if dense and {dense.label, setting.label} <= points.keys():
            arrow = {"arrowstyle": "-|>", "lw": 1.6, "shrinkA": 6, "shrinkB": 6}
            arrow["color"] = style[setting.label][0]
            axes.annotate("", points[setting.label], points[dense.label], arrowprops=arrow)
    axes.set_ylabel(f"{words(metric)} ({direction(metric)} is better)")
    low, high = axes.get_ylim()
    real = settings[0].runs.get(f"real_{metric}", pd.Series([math.nan])).iloc[0]
    if low - (high - low) / 2 <= real <= high + (high - low) / 2:
        axes.axhline(real, color=INK, ls=":", lw=1, alpha=0.6)
        axes.annotate(f"real images {real:.3g}", (0, real), (4, 3), fontsize=10,
                      xycoords=("axes fraction", "data"), textcoords="offset points")  # fmt: skip
    if points:
        _scale(axes, "x", [cost for cost, _ in points.values()])
        _scale(axes, "y", [value for _, value in points.values()])
    axes.margins(0.12)
    axes.set_xlabel(COSTS.get(x) or f"{words(x)} ({direction(x)} is better)")
    few = len({setting.backbone for setting in settings}) == 1 and len(settings) <= FEW
    _name_points(axes, settings, points, each=by_sample or few)
    return figure


def draw_curve(
    settings: Sequence[Setting], curves: pd.DataFrame, metric: str, x: str, label: str
) -> "Figure":
    """Return one metric on the way against `x` (step, flops or seconds), a line for each setting;
    `curves` of `read_curves` are those of this metric alone, `label` is of the x axis."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, axes = _new_figure((4.8, 3.4))
    drawn = []
    for setting in settings:
        own = curves[curves.folder.isin(setting.runs.folder)].groupby("step")
        rows = own.agg(x=(x, "mean"), y=("value", "mean"), low=("value", "min"),
                       high=("value", "max"), n=("value", "count"))  # fmt: skip
        rows = rows[rows.n == rows.n.max()]
        colour, style = looks(settings)[setting.label]
        axes.plot(rows.x, rows.y, color=colour, ls=style, lw=1.8, marker=".", ms=5)
        axes.fill_between(rows.x, rows.low, rows.high, color=colour, alpha=0.15, lw=0)
        drawn += [*rows.low, *rows.high]
    axes.set(xlabel=label, ylabel=words(metric))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(si))
    _scale(axes, "y", drawn)
    return figure


def as_svg(figure: "Figure", name: str) -> str:
    """Return a figure as an SVG element that scales with its place; `name` keeps its ids apart."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    head, tag, rest = text.partition(">")
    start = head[: head.index(" width=")] + head[head.index(" viewBox=") :]
    return start + f' role="img" aria-label="{name}"' + tag + rest


def _new_figure(size: tuple[float, float]) -> "tuple[Figure, Axes]":
    import matplotlib
    from matplotlib.figure import Figure

    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**dict.fromkeys(coloured, INK), "font.size": 12}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, which="major", color="#808080")
    return figure, axes


def _name_points(
    axes: "Axes", settings: Sequence[Setting], points: Mapping[str, Point], each: bool
) -> None:
    """Write each backbone beside its first point, or beside each point what else its setting is,
    where the fewest other names and points are."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # places are known then
    places = axes.transData.transform([*points.values()]).tolist() if points else []
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in places]
    sizes = {setting.backbone.rpartition("_")[2] for setting in settings}
    size = f"_{sizes.pop()}" if len(sizes) == 1 else ""  # of all alike, goes without saying
    named: set[str] = set()
    for setting in settings:
        if setting.label not in points or (setting.backbone in named and not each):
            continue
        named.add(setting.backbone)
        text = setting.backbone.removesuffix(size)
        if each:
            rest = setting.label.removeprefix(setting.backbone).strip()
            text = rest.partition(", ")[2] or rest
        name = axes.annotate(
            text, points[setting.label], BESIDE[0], textcoords="offset points",
            color=looks(settings)[setting.label][0], fontsize=9 if each else 11,
        )  # fmt: skip

        def box(place: Point, name: "Annotation" = name) -> Bbox:
            name.set(ha="left" if place[0] > 0 else "right")
            name.xyann = place
            return name.get_window_extent()

        free = min(BESIDE, key=lambda place: sum(map(box(place).overlaps, taken)))
        taken.append(box(free))


def _scale(axes: "Axes", which: str, values: Sequence[float]) -> None:
    """Make an axis logarithmic where its values span more than a factor of three, and label ticks
    by plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis, low, high = getattr(axes, f"{which}axis"), min(values), max(values)
    if low > 0 and high > 3 * low:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    form = si if high >= 1e4 else (lambda value, place=None: f"{value:.6g}")
    axis.set_major_formatter(FuncFormatter(form))
