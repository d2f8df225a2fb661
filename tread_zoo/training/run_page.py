"""A run's page, `index.html`: its state, losses and newest samples. The page reloads itself during
training. Curves are drawn without matplotlib, which would hold up training for a second."""

import html
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tread_zoo.credentials import without_credentials
from tread_zoo.data.files import write_text

PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">{refresh}
<title>{name}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: auto; padding: 1rem }}
img, svg {{ max-width: 100%; height: auto; image-rendering: pixelated }}
pre {{ white-space: pre-wrap }} .loss {{ stroke: #3b7dd8 }} .held_out_loss {{ stroke: #d8743b }}
text {{ fill: currentColor; font-size: 12px }} polyline {{ fill: none; stroke-width: 1.5 }}
</style>
<h1>{name}</h1>
<pre>{status}</pre>
{curves}
{pictures}
<p><a href="train.log">train.log</a>, <a href="metrics.jsonl">metrics.jsonl</a>,
<a href="config.json">config.json</a></p>
</html>
"""
WIDTH, HEIGHT, MARGIN = 720, 220, 40
CURVES = {"loss": "loss in training", "held_out_loss": "held-out loss"}
MOST_POINTS = 400  # points per curve
REFRESH_S = 20  # an open page reloads itself at this interval


def write_run_page(
    folder: Path, rows: Iterable[Mapping[str, Any]], status: Iterable[str], *, ended: bool = False
) -> None:
    """Write index.html, the page of the run in `folder`.

    Args:
        rows: the lines of `metrics.jsonl`.
        status: lines of text for the top of the page.
        ended: the run has ended, so the page stops reloading itself.
    """
    newest = sorted((folder / "samples").glob("step_*.png"))[-1:]
    titles = {path: f"samples at step {int(path.stem[5:])}" for path in newest}
    titles |= dict.fromkeys((folder / "samples").glob("real.png"), "real images")
    text = PAGE.format(
        name=html.escape(folder.resolve().name),
        status=html.escape(without_credentials("\n".join(status))),
        refresh="" if ended else f'<meta http-equiv="refresh" content="{REFRESH_S}">',
        curves=_curves(list(rows)),
        pictures="\n".join(
            f'<h2>{title}</h2><img src="samples/{path.name}" alt="{title}">'
            for path, title in titles.items()
        ),
    )  # fmt: skip
    write_text(folder / "index.html", text)


def _curves(rows: list[Mapping[str, Any]]) -> str:
    """Return an SVG of the losses in `rows`, the lines of metrics.jsonl, against the step, with a
    logarithmic vertical axis. It is empty if there are fewer than two losses."""
    curves = {
        name: [(row["step"], row[name]) for row in rows if row.get(name, 0) > 0] for name in CURVES
    }
    points = [point for curve in curves.values() for point in curve]
    if len(points) < 2:
        return ""
    last = max(step for step, _ in points)
    low, high = (math.log(end(value for _, value in points)) for end in (min, max))
    lines, legend = list[str](), list[str]()
    for name, curve in curves.items():
        chosen = [*curve[:: max(1, len(curve) // MOST_POINTS)], *curve[-1:]]
        places = " ".join(
            f"{MARGIN + (WIDTH - 2 * MARGIN) * step / last:.1f},"
            f"{MARGIN + (HEIGHT - 2 * MARGIN) * (high - math.log(y)) / max(high - low, 1e-9):.1f}"
            for step, y in chosen
        )
        lines.append(f'<polyline class="{name}" points="{places}"/>')
        if curve:
            at = MARGIN + 180 * len(legend)
            legend.append(
                f'<line class="{name}" x1="{at}" x2="{at + 20}" y1="16" y2="16" stroke-width="2"/>'
                f'<text x="{at + 26}" y="20">{CURVES[name]} {curve[-1][1]:.4g}</text>'
            )
    axis = [
        f'<text x="0" y="{MARGIN + 4}">{math.exp(high):.3g}</text>',
        f'<text x="0" y="{HEIGHT - MARGIN + 4}">{math.exp(low):.3g}</text>',
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 8}" text-anchor="end">step {last}</text>',
    ]
    inside = "".join([*legend, *axis, *lines])
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="losses">{inside}</svg>'
