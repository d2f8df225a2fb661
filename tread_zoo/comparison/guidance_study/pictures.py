"""What a study shows: each metric against the scale, and samples of each guidance side by side.

n images, C channels, H height, W width.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tread_zoo.comparison.guidance_study.plan import Plan, Trial
from tread_zoo.comparison.guidance_study.records import Record
from tread_zoo.comparison.guidance_study.report import (
    best_trial,
    by_guidance,
    mean_of,
    metrics_of,
)
from tread_zoo.comparison.markdown import LOWER_IS_BETTER, QUALITY

_COLUMNS = 3


def plot_scales(plan: Plan, records: Sequence[Record], path: Path) -> None:
    """Plot each metric against the scale as a PNG: a line a guidance, bars from seed to seed.

    A guidance with one scale is a level line across the others' scales.
    """
    from matplotlib.figure import Figure

    metrics = metrics_of(records)
    columns = min(_COLUMNS, len(metrics))
    lines = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.4 * lines + 0.4), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for panel in list(panels)[len(metrics) :]:
        panel.set_visible(False)
    for panel, metric in zip(panels, metrics, strict=False):
        title, factor, _ = QUALITY[metric]
        better = "lower" if metric in LOWER_IS_BETTER else "higher"
        panel.set(xlabel="guidance scale", title=f"{title} ({better} is better)")
        panel.grid(alpha=0.3)
        for number, (key, trials) in enumerate(by_guidance(plan.trials).items()):
            style = {"color": f"C{number % 10}", "label": _name(plan, key)}
            means = [factor * (mean_of(records, trial, metric) or math.nan) for trial in trials]
            if len(trials) == 1:
                panel.axhline(means[0], linestyle="--", **style)
                continue
            spans = [_range(records, trial, metric, factor) for trial in trials]
            bars = [
                [mean - low for mean, (low, _) in zip(means, spans, strict=True)],
                [high - mean for mean, (_, high) in zip(means, spans, strict=True)],
            ]
            scales = [trial.scale for trial in trials]
            panel.errorbar(scales, means, yerr=bars, marker="o", capsize=3, **style)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    figure.savefig(path, dpi=120)


def draw_samples(
    plan: Plan, records: Sequence[Record], metric: str | None, folder: Path, path: Path
) -> bool:
    """Draw the first images of each guidance at its best scale, a row each, as a PNG.

    Args:
        metric: that says which scale is best; without one, the first is shown.
        folder: of the records.
        path: of the PNG.

    Returns:
        Whether it was drawn: what is neither grey nor coloured, such as latents, is not.
    """
    from matplotlib.figure import Figure

    rows = []
    for key, trials in by_guidance(plan.trials).items():
        best = (best_trial(trials, records, metric) if metric else None) or trials[0]
        record = next(r for r in records if r.key == best.key)  # of the first seed
        with np.load(folder / record.images) as file:
            images = file["images"]  # [n, C, H, W]
        label = f"{_name(plan, key)}\nscale {best.scale:g}, {best.num_steps} steps"
        rows.append((label, images))
    count, channels, height, width = rows[0][1].shape
    if count == 0 or channels not in (1, 3):
        return False
    cell = 0.7
    figure = Figure(
        figsize=(cell * count * width / height + 2.4, cell * len(rows) + 0.2), layout="constrained"
    )
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, (label, images) in zip(panels, rows, strict=True):
        strip = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=128)
        strip = np.concatenate(list(strip.transpose(0, 2, 3, 1)), axis=1)  # [H, n W, C]
        panel.imshow(strip.repeat(3, axis=-1) if channels == 1 else strip, interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        panel.set_ylabel(label, rotation=0, ha="right", va="center", fontsize=8)
        panel.set_frame_on(False)
    figure.savefig(path, dpi=150)
    return True


def _name(plan: Plan, key: tuple[str, str]) -> str:
    """Return the guidance, and the sampler where there are several."""
    several = len({trial.sampler.label for trial in plan.trials}) > 1
    return f"{key[0]}, {key[1]}" if several else key[0]


def _range(
    records: Sequence[Record], trial: Trial, metric: str, factor: float
) -> tuple[float, float]:
    """Return the smallest and the largest value over the seeds."""
    values = [
        factor * r.values[metric] for r in records if r.key == trial.key and metric in r.values
    ]
    return (min(values), max(values)) if values else (math.nan, math.nan)
