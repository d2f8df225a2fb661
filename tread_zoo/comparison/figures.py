"""Figures of a comparison: SVG in the text colour of the page around it, and PNG.

A setting is a group of runs that differ only in seed. Each backbone has a colour, or each setting
if there is one backbone. Dense (unrouted) settings have solid lines and filled points, routed ones
dashed lines and hollow points. Dense settings of fewer blocks have dotted lines and diamonds. In an
SVG, a group drawn in colour i has the class `s<i>`; its title, if it has one, is shown on hover.
"""

import io
import math
import re
from collections.abc import Mapping, Sequence
from colorsys import hls_to_rgb
from html import escape
from itertools import cycle, product
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from tread_zoo.comparison.findings import (
    COSTS,
    Setting,
    direction,
    metric_label,
    metric_with_arrow,
    short_names,
    with_si_prefix,
)
from tread_zoo.comparison.intervals import Interval, interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GREY = "#010203", "#808080"  # INK becomes the text colour of the page
COLOURS = (
    "#2a7fd4", "#e0731d", "#2e9e5b", "#c94f9b", "#8d6bd1", "#b08d17", "#1aa3a8", "#d14b4b",
    "#76818e", "#9a5b2f", "#7fb53a", "#5a5fd0",
)  # fmt: skip
DASHES = ("--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))  # for routed settings
OFFSETS = [  # offsets of a name from its point, in typographic points, nearest first
    (across * far, up * far - 3)
    for far, across, up in product((9, 18, 30, 44), (1, -1), (0.6, -1.2, 0, 2, -2))
]
THEME = (  # style of an SVG file
    "<style>svg{color:#1d2126}text{paint-order:stroke;stroke:#fff;stroke-width:2px}@media"
    "(prefers-color-scheme:dark){svg{color:#e4e7eb}text{stroke:#15181c}}</style>"
)


class Axis(NamedTuple):
    """The scale, from `low` to `high`, of plots in a table's cells. Positions are percentages of a
    cell's width."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Sequence[Interval], mark: float) -> "Axis":
        """Return an axis that spans the value `mark`, the means of `values`, and the ends of each
        interval, except intervals whose half is longer than a third of what mark and means span."""
        inside = [v for v in (mark, *(one.mean for one in values)) if math.isfinite(v)] or [0.0]
        reach = (max(inside) - min(inside)) or abs(inside[0]) or 1.0
        ends = [end for one in values if one.half <= reach / 3 for end in (one.low, one.high)]
        return cls(min(inside + ends) - reach / 16, max(inside + ends) + reach / 16)

    def position(self, value: float) -> float:
        """Return the position of a value, clipped to the axis."""
        return round(min(100.0, max(0.0, 100 * (value - self.low) / (self.high - self.low))), 2)

    def ticks(self, count: int) -> list[tuple[float, str]]:
        """Return pairs (position, label) of about `count` round values."""
        from matplotlib.ticker import MaxNLocator

        values = MaxNLocator(count, steps=[1, 2, 5, 10]).tick_values(self.low, self.high)
        return [(self.position(v), f"{v:.6g}") for v in values if self.low <= v <= self.high]


class Look(NamedTuple):
    """How the points and lines of a setting are drawn.

    Args:
        number: index of the colour.
        name: what the colour stands for: the backbone, or the setting.
        colour: the colour as #rrggbb.
        dash, marker, fill: matplotlib's style of the line and marker, and fill colour of the
            marker.
    """

    number: int
    name: str
    colour: str
    dash: Any = "-"
    marker: str = "o"
    fill: str = "none"

    def options(self, title: str = "", **options: Any) -> dict[str, Any]:
        """Return options of matplotlib's `plot` for this look, changed by `options`; `as_svg` shows
        `title` on hover."""
        style = {"color": self.colour, "marker": self.marker, "mfc": self.fill, "ls": self.dash}
        return {**style, "gid": f"|s{self.number}|{title}", **options}


def looks(settings: Sequence[Setting]) -> dict[str, Look]:
    """Return the `Look` of each setting, by the setting's label."""
    names = short_names(settings)
    if len({setting.backbone for setting in settings}) > 1:
        names = {s.label: s.backbone for s in settings}
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names.values()))}
    colours: Sequence[Any] = COLOURS
    if len(numbers) > len(COLOURS):
        colours = [hls_to_rgb(i / len(numbers), 0.5, 0.6) for i in range(len(numbers))]
        colours = ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in colours]
    shallow = {less.label for s in settings for less in s.shallower(settings)}
    rests = dict.fromkeys(s.label.removeprefix(s.backbone) for s in settings if not s.is_dense)
    dashes = dict(zip(rests, cycle(DASHES), strict=False))
    style = {}
    for s in settings:
        look = Look(numbers[names[s.label]], names[s.label], colours[numbers[names[s.label]]])
        if not s.is_dense:
            look = look._replace(dash=dashes[s.label.removeprefix(s.backbone)])
        elif s.label in shallow:
            look = look._replace(dash=":", marker="D", fill=look.colour)
        else:
            look = look._replace(fill=look.colour)
        style[s.label] = look
    return style


def draw_plane(settings: Sequence[Setting], y: str, x: str, *, arrows: bool) -> "Figure":
    """Return a plot of a score, column `y` of the runs, against a cost or score, column `x`. Small
    points are runs, large ones the settings' means. With `arrows`, arrows lead from each setting
    without routes to the routed ones that are compared with it."""
    figure, axes = _new_figure((5.8, 4.2))
    points: dict[str, tuple[float, float]] = {}
    style = looks(settings)
    for label, runs in ((s.label, s.runs[[x, y]].dropna()) for s in settings):
        if len(runs):
            look, (cost, value) = style[label], (runs[x].mean(), runs[y].mean())
            points[label] = cost, value
            axes.plot(runs[x], runs[y], **look.options(ls="", marker=".", alpha=0.45, mew=0))
            title = f"{label}: {metric_label(y)} {interval(runs[y].tolist()).in_brackets()}, "
            title += f"{COSTS.get(x, metric_label(x))} {with_si_prefix(cost)}"
            axes.plot(cost, value, **look.options(title, ms=7, mew=1.6))
    for setting in settings if arrows else ():
        dense, look = setting.dense_of(settings), style[setting.label]
        if dense and {dense.label, setting.label} <= points.keys():
            arrow = {"arrowstyle": "-|>", "lw": 1.4, "shrinkA": 6, "shrinkB": 6}
            arrow |= {"color": look.colour, "gid": look.options()["gid"]}
            axes.annotate("", points[setting.label], points[dense.label], arrowprops=arrow)
    drawn = pd.concat([setting.runs for setting in settings])
    _scale(axes, "x", drawn[x].dropna().tolist())
    _scale(axes, "y", drawn[y].dropna().tolist())
    axes.margins(0.08)
    axes.set_xlabel(COSTS.get(x) or metric_with_arrow(x))
    axes.set_ylabel(metric_with_arrow(y))
    if len({look.name for look in style.values()}) <= len(COLOURS):
        _name_points(axes, {style[label]: point for label, point in reversed(points.items())})
    return figure


def draw_ranking(settings: Sequence[Setting], metric: str) -> "Figure":
    """Return a plot of a score for settings of equal cost: one row per setting, the best on top.
    Small points are runs, the large one is their mean, and a line shows its interval."""
    scores = {s.label: s.runs[metric].dropna().tolist() for s in settings}
    means = {label: interval(values) for label, values in scores.items() if values}
    best_is_high = direction(metric) == "higher"
    ranked = sorted(means, key=lambda label: means[label].mean, reverse=not best_is_high)
    figure, axes = _new_figure((5.8, 0.8 + 0.32 * len(ranked)))
    style, names = looks(settings), short_names(settings)
    for row, label in enumerate(ranked):
        look, mean = style[label], means[label]
        title = f"{label}: {metric_label(metric)} {mean.in_brackets()}"
        axes.plot(scores[label], [row] * mean.n, **look.options(ls="", marker=".", alpha=0.45))
        if mean.n > 1:
            axes.plot((mean.low, mean.high), (row, row), **look.options(title, marker="", ls="-"))
        axes.plot(mean.mean, row, **look.options(title, ms=7, mew=1.6))
    if means:
        points = [interval([value]) for values in scores.values() for value in values]
        axes.set_xlim(*Axis.over([*means.values(), *points], means[ranked[0]].mean))
    axes.set_yticks(range(len(ranked)), [names[label] for label in ranked], parse_math=False)
    axes.set_xlabel(metric_with_arrow(metric))
    return figure


def draw_lines(
    lines: Mapping[str, tuple[Look, pd.DataFrame]],
    label: str,
    limits: tuple[float, float] | None = None,
) -> "Figure":
    """Return a plot of named lines, each with a band around it.

    Args:
        lines: look and table of each line by name. The table has the columns step, y, and low and
            high, the ends of the band.
        label: name of the y axis or, with `limits`, title of the plot.
        limits: ends of the y axis. The plot is then small and has a line at 0.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure, axes = _new_figure((3.4, 2.4) if limits else (5.8, 3.6))
    for name, (look, rows) in lines.items():
        axes.plot(rows.step, rows.y, **look.options(name, marker="", lw=1.6))
        axes.fill_between(rows.step, rows.low, rows.high, color=look.colour, alpha=0.14, lw=0,
                          gid=look.options()["gid"])  # fmt: skip
        for at in rows.itertuples() if len(rows) <= 20 else ():
            title = f"{name} at step {at.step}: {at.y:.4g} [{at.low:.4g}, {at.high:.4g}]"
            axes.plot(at.step, at.y, **look.options(title, ms=4))
    if limits:
        axes.axhline(0, color=INK, lw=0.8)
        axes.set_ylim(limits)
        axes.set_title(label, fontsize=10, loc="left")
    else:
        _scale(axes, "y", [v for _, rows in lines.values() for v in (*rows.low, *rows.high)])
        axes.set_ylabel(label)
    axes.set_xlabel("steps")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(with_si_prefix))
    return figure


def add_legend(figure: "Figure", settings: Sequence[Setting]) -> None:
    """Add a legend of the settings below a figure."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=k, **look.options()) for k, look in looks(settings).items()]
    columns = 2 if max(len(setting.label) for setting in settings) > 24 else 3
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8,
                           frameon=False)  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * math.ceil(len(handles) / columns))


def as_svg(figure: "Figure", name: str, *, alone: bool = False) -> str:
    """Return a figure as an SVG element for a page or, with `alone`, as the text of an SVG file.
    `name` keeps its ids apart from those of other figures, and in a page describes it to screen
    readers."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'<g id="\|(s\d+)\|">', r'<g class="\1">', text)
    text = re.sub(r'<g id="\|(s\d+)\|([^"]+)">', r'<g class="\1"><title>\2</title>', text)
    head, tag, rest = text.partition(">")
    if alone:
        return head + tag + THEME + rest
    start = head[: head.index(" width=")] + head[head.index(" viewBox=") :]
    return start + f' role="img" aria-label="{escape(name)}"' + tag + rest


def _new_figure(size: tuple[float, float]) -> "tuple[Figure, Axes]":
    import matplotlib
    from matplotlib.figure import Figure

    coloured = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {**dict.fromkeys(coloured, INK), "font.size": 10}
    style["text.parse_math"] = False  # names may have a $
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, which="major", color=GREY)
    return figure, axes


def _name_points(axes: "Axes", points: Mapping[Look, tuple[float, float]]) -> None:
    """Write the name of each look near its point (x, y), and draw a line from name to point. A name
    that several looks have is written once, for the last of them. Each name takes the position in
    `OFFSETS` where it covers the fewest points and other names."""
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # now positions are known
    taken = [
        Bbox.from_extents(*(point - line.get_markersize()), *(point + line.get_markersize()))
        for line in axes.lines
        for point in axes.transData.transform(line.get_xydata())
    ]
    names: list[Bbox] = []
    for look, point in {look.name: (look, point) for look, point in points.items()}.values():
        gid = look.options()["gid"]
        name = axes.annotate(look.name, point, OFFSETS[0], textcoords="offset points", fontsize=9,
                             color=look.colour, gid=gid, parse_math=False)  # fmt: skip
        name.set_in_layout(False)

        def move(offset: tuple[float, float], name: Any = name) -> Bbox:
            name.set(ha="left" if offset[0] > 0 else "right")
            name.xyann = offset
            return name.get_window_extent()

        def cost(offset: tuple[float, float], move: Any = move) -> int:
            box = move(offset)
            outside = not (axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max))
            return sum(map(box.overlaps, taken)) + 9 * (sum(map(box.overlaps, names)) + outside)

        offset = min(OFFSETS, key=cost)
        names.append(move(offset))
        line = {"arrowstyle": "-", "lw": 0.5, "color": GREY, "gid": gid}
        axes.annotate("", point, offset, textcoords="offset points", arrowprops=line)


def _scale(axes: "Axes", which: str, values: Sequence[float]) -> None:
    """Make the axis `which` (x or y) logarithmic if its values span more than a factor of three."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    finite = [value for value in values if math.isfinite(value)] or [1.0]
    axis, low, high = getattr(axes, f"{which}axis"), min(finite), max(finite)
    if low > 0 and high > 3 * low:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
    form = with_si_prefix if high >= 1e4 else (lambda value, index=None: f"{value:.6g}")
    axis.set_major_formatter(FuncFormatter(form))
