"""Curves of quality against what it took, and scores with their spread.

One colour a backbone (or the first field that was compared); dense runs are drawn solid, the others
broken. Lines are means over seeds, bands reach from the smallest to the largest.
"""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.comparison.curves import AXES, HELD_OUT, CurveOf, drawn_curves
from tread_zoo.comparison.groups import Group
from tread_zoo.comparison.machines import Machines
from tread_zoo.comparison.markdown import LOWER_IS_BETTER, QUALITY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("--", ":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
FEW_POINTS = 30  # so many are marked
CURVES = "_on_the_way"  # in the names of files
AGAINST = "against steps, FLOPs and seconds"


def draw_plots(groups: Sequence[Group], folder: Path) -> dict[str, Path]:
    """Draw PNGs into `folder`, and return them by title: what was measured on the way, against
    steps, FLOPs and seconds side by side, and every score at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    made, looks = {}, _looks(groups)
    runs = [run for group in groups for run in group.ended.values()]
    for name, curve in drawn_curves(runs).items():
        path = folder / f"{name}{CURVES}.png"
        _draw_curves(groups, looks, name, curve, path)
        made[f"{_capital(QUALITY[name][0])} {AGAINST}"] = path
    for name, (title, factor, _) in QUALITY.items():
        if any(name in run.values for run in runs):
            path = folder / f"{name}.png"
            _draw_scores(groups, looks, name, title, factor, path)
            made[_capital(title)] = path
    return made


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _looks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return colour and line style of each group."""
    coloured = [_coloured_by(group.choices) for group in groups]
    colours = list(dict.fromkeys(colour for colour, _ in coloured))
    pairs = list(zip(groups, coloured, strict=True))
    rests = dict.fromkeys(rest for group, (_, rest) in pairs if not group.is_dense)
    styles = dict(zip(rests, cycle(STYLES), strict=False))
    return [
        {
            "color": f"C{colours.index(colour) % 10}",
            "linestyle": "-" if group.is_dense else styles[rest],
        }
        for group, (colour, rest) in pairs
    ]


def _coloured_by(choices: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the choice that a colour stands for, and the others."""
    field = "backbone" if "backbone" in choices else next(iter(choices), "")
    return choices.get(field, ""), tuple(v for f, v in choices.items() if f != field)


def _draw_curves(
    groups: Sequence[Group],
    looks: Sequence[dict[str, Any]],
    name: str,
    curve: CurveOf,
    path: Path,
) -> None:
    """Draw a score against all that was spent for it, a panel each: means at the steps that all
    seeds of a group have."""
    figure, panels = _new_axes((15.0, 4.5), len(AXES))
    title, factor, form = QUALITY[name]
    seen, apart = list[float](), False
    machines = Machines([run for group in groups for run in group.results])
    for group, look in zip(groups, looks, strict=True):
        runs = [run for run in group.ended.values() if curve(run)]
        shared = set.intersection(*({s for s, _ in curve(run)} for run in runs)) if runs else set()
        if not shared:
            continue
        steps = sorted(shared)
        values = [[factor * dict(curve(run))[step] for run in runs] for step in steps]
        means = [sum(x) / len(x) for x in values]
        low, high = [min(x) for x in values], [max(x) for x in values]
        marker = "." if len(steps) <= FEW_POINTS else ""
        for axes, (axis, (_, spent)) in zip(panels, AXES.items(), strict=True):
            if axis == "seconds" and len(machines.split(runs)) > 1:
                apart = True  # theirs are no seconds of one clock
                continue
            places = [sum(spent(run, step) for run in runs) / len(runs) for step in steps]
            axes.plot(places, means, label=group.label, lw=1.5, marker=marker, ms=5, **look)
            axes.fill_between(places, low, high, color=look["color"], alpha=0.12, lw=0)
        seen += [*low, *high]
    lower = name in LOWER_IS_BETTER
    notes = ["dense, averaged weights"] if name == HELD_OUT else []
    notes.append("lower is better" if lower else "higher is better")
    panels[0].set_ylabel(f"{title}\n({'; '.join(notes)})")
    for axes, (axis, (label, _)) in zip(panels, AXES.items(), strict=True):
        note = "\n(without settings of several machines)" if apart and axis == "seconds" else ""
        axes.set_xlabel(label + note)
        if lower and min(seen, default=0) > 0:
            _logarithmic(axes, math.log10(max(seen) / min(seen)))
        _draw_real(axes, _of_real_images(groups, name), factor, form, seen)
        axes.grid(alpha=0.3, which="both")
    figure.legend(
        *panels[0].get_legend_handles_labels(),
        fontsize=8, loc="outside right upper", handlelength=3,
    )  # fmt: skip
    _save(figure, path)


def _logarithmic(axes: "Axes", decades: float) -> None:
    """Make the y axis, which spans so many decades, logarithmic, with plain numbers at ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades > 1 else range(1, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_real(
    axes: "Axes", real: float | None, factor: float, form: str, seen: Sequence[float]
) -> None:
    """Say what real images score, and draw it where it would not press the curves together."""
    if real is None or not seen:
        return
    value, low, high = factor * real, min(seen), max(seen)
    if axes.get_yscale() == "log":
        near = low * low / high <= value <= high * high / low
    else:
        near = low - (high - low) <= value <= high + (high - low)
    text = f"held-out real images: {value:{form}}"
    axes.axhline(
        value if near else low, color="gray", ls=":" if near else "", lw=1,
        label=text if near else f"{text} (not drawn)",
    )  # fmt: skip


def _of_real_images(groups: Sequence[Group], name: str) -> float | None:
    return next((r.real[name] for g in groups for r in g.results if name in r.real), None)


def _draw_scores(
    groups: Sequence[Group],
    looks: Sequence[dict[str, Any]],
    name: str,
    title: str,
    factor: float,
    path: Path,
) -> None:
    figure, (axes,) = _new_axes((7.5, 0.8 + 0.3 * len(groups)))
    for place, (group, look) in enumerate(zip(groups, looks, strict=True)):
        values = [factor * r.values[name] for r in group.ended.values() if name in r.values]
        filled = look["color"] if group.is_dense else "none"
        axes.plot(
            values, [place] * len(values), "o", color=look["color"], markerfacecolor=filled, ms=5
        )
        if values:
            axes.plot(sum(values) / len(values), place, "|", color=look["color"], ms=14)
    real = _of_real_images(groups, name)
    if real is not None:
        axes.axvline(factor * real, color="gray", ls=":", label="held-out real images")
        axes.legend(fontsize=8)
    axes.set_yticks(range(len(groups)), [group.label for group in groups], fontsize=8)
    axes.set(xlabel=title, ylim=(len(groups) - 0.5, -0.5))
    axes.grid(alpha=0.3, axis="x")
    _save(figure, path)


def _new_axes(size: tuple[float, float], columns: int = 1) -> "tuple[Figure, Sequence[Axes]]":
    """Return a figure and its panels, which share the y axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns, sharey=True, squeeze=False)[0]


def _save(figure: "Figure", path: Path) -> None:
    """Write a PNG of 256 colours, a third of the bytes of one that has all shades of its bands."""
    from PIL import Image

    drawn = BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    image = Image.open(drawn).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
