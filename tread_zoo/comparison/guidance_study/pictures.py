"""What a study shows: each metric against the scale, and samples of each guidance side by side.

n images, C channels, H height, W width.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tread_zoo.comparison.guidance_study.plan import Plan
from tread_zoo.comparison.guidance_study.records import Record
from tread_zoo.comparison.guidance_study.report import (
    best_trial,
    by_guidance,
    metrics_of,
    several_samplers,
    values_of,
)
from tread_zoo.comparison.markdown import LOWER_IS_BETTER, QUALITY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = 3


def plot_scales(plan: Plan, records: Sequence[Record]) -> "Figure":
    """Return a figure of each metric against the scale: a line a guidance, bars over the seeds.

    A guidance with one scale is a dashed level across the others' scales.
    """
    from matplotlib.figure import Figure

    metrics = metrics_of(records)
    columns = min(_COLUMNS, len(metrics))
    lines = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines + 0.4), layout="constrained")
    for place, metric in enumerate(metrics, start=1):
        panel = figure.add_subplot(lines, columns, place)
        title, factor, _ = QUALITY[metric]
        better = "lower" if metric in LOWER_IS_BETTER else "higher"
        panel.set(xlabel="guidance scale", title=f"{title} ({better} is better)")
        panel.grid(alpha=0.3)
        for number, (key, trials) in enumerate(by_guidance(plan.trials).items()):
            style = {"color": f"C{number % 10}", "label": _name(plan, key)}
            values = [[factor * v for v in values_of(records, one, metric)] for one in trials]
            _draw_line(panel, [one.scale for one in trials], values, style)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    return figure


def draw_samples(
    plan: Plan, records: Sequence[Record], metric: str | None, folder: Path
) -> "Figure | None":
    """Return a figure of the first images of each guidance at its best scale, a row each.

    Args:
        metric: that says which scale is best; without one, the first is shown.
        folder: of the records.

    Returns:
        None for images that are neither grey nor coloured, such as latents, or where none is kept.
    """
    from matplotlib.figure import Figure

    rows = []
    for key, trials in by_guidance(plan.trials).items():
        best = (best_trial(trials, records, metric) if metric else None) or trials[0]
        record = next(r for r in records if r.key == best.key)  # of the first seed
        with np.load(folder / record.images, allow_pickle=False) as file:
            images = file["images"]  # [n, C, H, W]
        steps = f"{best.num_steps} step{'s' if best.num_steps > 1 else ''}"
        rows.append((f"{_name(plan, key)}\nscale {best.scale:g}, {steps}", images))
    count, channels, height, width = rows[0][1].shape
    if count == 0 or channels not in (1, 3):
        return None
    cell = 0.7  # inches
    figure = Figure(
        figsize=(cell * count * width / height + 1.6, cell * len(rows) + 0.2), layout="constrained"
    )
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, (label, images) in zip(panels, rows, strict=True):
        framed = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=128)
        strip = np.concatenate(list(framed.transpose(0, 2, 3, 1)), axis=1)  # [H, n W, C]
        panel.imshow(strip.repeat(3, axis=-1) if channels == 1 else strip, interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        panel.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        panel.set_frame_on(False)
    return figure


def _draw_line(
    panel: "Axes", scales: Sequence[float], values: Sequence[Sequence[float]], style: dict[str, Any]
) -> None:
    """Draw one guidance: `values` are those of the seeds at each of `scales`, some maybe empty."""
    points = [
        (scale, sum(own) / len(own), min(own), max(own))
        for scale, own in sorted(zip(scales, values, strict=True))
        if own
    ]
    if len(scales) == 1 and points:
        panel.axhline(points[0][1], linestyle="--", **style)
    elif points:
        at, means, lows, highs = (list(column) for column in zip(*points, strict=True))
        below = [mean - low for mean, low in zip(means, lows, strict=True)]
        above = [high - mean for mean, high in zip(means, highs, strict=True)]
        panel.errorbar(at, means, yerr=[below, above], marker="o", capsize=3, **style)


def _name(plan: Plan, key: tuple[str, str]) -> str:
    """Return the guidance, and the sampler where there are several."""
    return f"{key[0]}, {key[1]}" if several_samplers(plan) else key[0]
