"""Curves of quality against what it took, and scores with their spread.

One colour a backbone (the first field that was compared); dense runs are drawn solid, the others
broken. Lines are means over seeds, bands reach from the smallest to the largest.
"""

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tread_zoo.comparison.groups import Group
from tread_zoo.comparison.markdown import QUALITY
from tread_zoo.comparison.results import RunResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("--", ":", "-.", (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
# name -> label, what a run had spent of it at step k
AXES: dict[str, tuple[str, Callable[[RunResult, int], float]]] = {
    "steps": ("optimizer steps", lambda run, step: step),
    "flops": (
        "training FLOPs, 10^12",
        lambda run, step: run.flops * run.images * step / run.num_steps / 1e12,
    ),
    "seconds": ("seconds of training steps", lambda run, step: run.seconds * step / run.num_steps),
}


def draw_plots(groups: Sequence[Group], folder: Path) -> dict[str, Path]:
    """Draw PNGs into `folder`, and return them by title: the held-out loss against steps, FLOPs and
    seconds, where the runs logged it on their way, and every score that they have."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    looks = _looks(groups)
    if any(len(run.curve) > 1 for group in groups for run in group.ended.values()):
        for axis, (label, _) in AXES.items():
            path = folder / f"held_out_loss_{axis}.png"
            _draw_curves(groups, looks, axis, path)
            made[f"Held-out loss against {label.partition(',')[0]}"] = path
    for name, (title, factor, _) in QUALITY.items():
        if any(name in run.values for group in groups for run in group.ended.values()):
            path = folder / f"{name}.png"
            _draw_scores(groups, looks, name, title, factor, path)
            made[title[0].upper() + title[1:]] = path
    return made


def _looks(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return colour and line style of each group."""
    firsts = list(dict.fromkeys(next(iter(group.choices.values()), "") for group in groups))
    rests = dict.fromkeys(tuple(g.choices.values())[1:] for g in groups if not g.is_dense)
    styles = dict(zip(rests, cycle(STYLES), strict=False))
    return [
        {
            "color": f"C{firsts.index(next(iter(group.choices.values()), '')) % 10}",
            "linestyle": "-" if group.is_dense else styles[tuple(group.choices.values())[1:]],
        }
        for group in groups
    ]


def _draw_curves(
    groups: Sequence[Group], looks: Sequence[dict[str, Any]], axis: str, path: Path
) -> None:
    figure, axes = _new_axes((7.5, 4.5))
    label, spent = AXES[axis]
    for group, look in zip(groups, looks, strict=True):
        runs = [run for run in group.ended.values() if run.curve]
        shared = set.intersection(*({s for s, _ in run.curve} for run in runs)) if runs else set()
        if not shared:
            continue
        steps = sorted(shared)
        losses = [[dict(run.curve)[step] for run in runs] for step in steps]
        places = [sum(spent(run, step) for run in runs) / len(runs) for step in steps]
        axes.plot(places, [sum(x) / len(x) for x in losses], label=group.label, lw=1.5, **look)
        low, high = [min(x) for x in losses], [max(x) for x in losses]
        axes.fill_between(places, low, high, color=look["color"], alpha=0.12, lw=0)
    axes.set(xlabel=label, ylabel="held-out loss (dense, averaged weights)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def _draw_scores(
    groups: Sequence[Group],
    looks: Sequence[dict[str, Any]],
    name: str,
    title: str,
    factor: float,
    path: Path,
) -> None:
    figure, axes = _new_axes((7.5, 0.8 + 0.3 * len(groups)))
    for place, (group, look) in enumerate(zip(groups, looks, strict=True)):
        values = [factor * r.values[name] for r in group.ended.values() if name in r.values]
        filled = look["color"] if group.is_dense else "none"
        axes.plot(
            values, [place] * len(values), "o", color=look["color"], markerfacecolor=filled, ms=5
        )
        if values:
            axes.plot(sum(values) / len(values), place, "|", color=look["color"], ms=14)
    real = next((r.real[name] for g in groups for r in g.results if name in r.real), None)
    if real is not None:
        axes.axvline(factor * real, color="gray", ls=":", label="held-out real images")
        axes.legend(fontsize=8)
    axes.set_yticks(range(len(groups)), [group.label for group in groups], fontsize=8)
    axes.set(xlabel=title, ylim=(len(groups) - 0.5, -0.5))
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=100)


def _new_axes(size: tuple[float, float]) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.add_subplot()
