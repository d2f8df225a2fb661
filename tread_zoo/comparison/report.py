"""The report of a comparison: CSV, markdown and one HTML page that needs no other file."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tread_zoo.comparison.figures import DASHES, as_svg, draw_curve, draw_quality, looks
from tread_zoo.comparison.findings import (
    HELD_OUT,
    Setting,
    Table,
    best_by_sample,
    best_settings,
    comparable_metrics,
    contribution_table,
    goal_table,
    group_settings,
    routing_table,
    scores_table,
    words,
)
from tread_zoo.config import flatten
from tread_zoo.data.files import printable, without_paths


def write_report(
    runs: pd.DataFrame,
    curves: pd.DataFrame,
    out: Path,
    *,
    title: str,
    command: str = "",
    metric: str | None = None,
    goal: float | None = None,
    failed: Mapping[str, str] | None = None,
) -> str:
    """Write `index.html`, `report.md`, `results.csv`, `curves.csv` and `quality.png` to the folder
    `out`, and return the markdown.

    Args:
        runs, curves: of `read_runs` and `read_curves`. Where a run has several rows, they are its
            scores by several guidances or samplers, and what they cost is that of a sample.
        out: folder.
        title: first line.
        command: what made the runs, or "".
        metric: what the first screen is about; None takes the first score that all runs have.
        goal: a value of `metric`; what each setting spent until it met it gets a table.
        failed: why runs have no row, by name.

    Raises:
        ValueError: no run was scored, or the runs have no score that compares.
    """
    ended = runs[runs.ended]
    if not len(ended):
        raise ValueError("No run has been scored: there is nothing to compare.")
    again = ended.astype(str).duplicated([*ended.attrs["settings"], "seed"])
    repeated, ended = ended[again], ended[~again]
    metrics, notes = comparable_metrics(ended)
    if HELD_OUT not in metrics:  # or it would stand in where `metric` has no curve
        ended = ended.drop(columns=HELD_OUT, errors="ignore")
    if metric is not None and metric not in metrics:
        raise ValueError(f"compare.metric={metric} must be one of {', '.join(metrics)}.")
    notes += [f"{name} failed: {reason}" for name, reason in (failed or {}).items()]
    notes += [f"{name} has the settings and seed of another run." for name in repeated.folder]
    going = runs[~runs.ended].itertuples()
    notes += [f"{run.folder} is at step {run.steps}, not scored." for run in going]
    main, settings = metric or metrics[0], group_settings(ended)
    by_sample = bool(ended.folder.duplicated().any())
    pairs: Table = ([], [])
    if by_sample:
        headline = best_by_sample(settings, main)
    else:
        pairs, paying = routing_table(settings, curves, main)
        headline = [*best_settings(settings, ended, curves, main), *paying]

    out.mkdir(parents=True, exist_ok=True)
    runs.drop(columns=["protocol", "samples"]).to_csv(out / "results.csv", index=False)
    curves.to_csv(out / "curves.csv", index=False)
    quality = draw_quality(settings, main, "flops_per_sample" if by_sample else "flops")
    quality.savefig(out / "quality.png", dpi=120, facecolor="white")
    about: dict[str, Any] = {
        "title": title,
        "subtitle": _count(settings, ended),
        "command": command,
        "headline": headline,
        "scores": scores_table(settings, metrics),
        "pairs": pairs,
        "contributions": [] if by_sample else contribution_table(settings),
        "goals": ([], []) if goal is None else goal_table(settings, curves, main, goal),
        "notes": notes,
    }
    about = without_paths(about)
    page = _render(
        **about,
        goal="" if goal is None else f"{words(main)} {goal:g}",
        by_sample=by_sample,
        quality=as_svg(quality, f"{words(main)} against FLOPs"),
        plane=_plane(settings, metrics),
        samples={} if by_sample else _samples(settings),
        figures={} if by_sample else _curve_figures(settings, ended, metrics, curves),
        legend=[(k, colour, DASHES.get(d, "━━━")) for k, (colour, d) in looks(settings).items()],
        machines=list(dict.fromkeys(ended.machine.dropna())),
        protocol=without_paths(flatten(ended.protocol.iloc[0] or {})),
    )
    (out / "index.html").write_text(page)
    text = _markdown(**about)
    (out / "report.md").write_text(text)
    return text


def _count(settings: Sequence[Setting], runs: pd.DataFrame) -> str:
    num_backbones = len({setting.backbone for setting in settings})
    counts = {"setting": len(settings), "backbone": num_backbones, "run": len(runs)}
    first, second, third = (f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items())
    return f"{first} of {second}, {third}, on {' and '.join(sorted(set(runs.data)))}"


def _samples(settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the pictures of the first seed that all settings have, and of real images if a run
    has them."""
    common = set.intersection(*(set(setting.runs.seed) for setting in settings))
    pictures: dict[str, str] = {}
    for setting in settings:
        runs = setting.runs.sort_values("seed")
        path = runs[runs.seed == min(common)].samples.iloc[0] if common else runs.samples.iloc[0]
        if path and Path(path).exists():
            real = Path(path).with_name("real.png")
            if real.exists() and "real images" not in pictures:
                pictures = {"real images": _embed(real), **pictures}
            pictures[setting.label] = _embed(Path(path))
    seed = f"seed {min(common)}" if common else "each setting's first seed"
    return {"seed": seed, "pictures": pictures}


def _plane(settings: Sequence[Setting], metrics: Sequence[str]) -> str:
    """Return precision against recall as SVG, or "" where one of them was not scored."""
    if not {"precision", "recall"} <= set(metrics):
        return ""
    return as_svg(draw_quality(settings, "precision", "recall"), "precision against recall")


def _embed(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _curve_figures(
    settings: Sequence[Setting], runs: pd.DataFrame, metrics: Sequence[str], curves: pd.DataFrame
) -> dict[str, list[str]]:
    """Return by metric its figures against steps, FLOPs and seconds, of all that every run measured
    more than once on its way."""
    labels = {"step": "steps", "flops": "training FLOPs", "seconds": "seconds of training steps"}
    if runs.machine.nunique() > 1:
        del labels["seconds"]  # of several clocks
    figures: dict[str, list[str]] = {}
    of_runs = curves[curves.folder.isin(runs.folder)]
    for (_, metric), own in of_runs.groupby(["source", "metric"]):  # scores replace the log's
        counts = own.groupby("folder").step.nunique()
        if metric in metrics and len(counts) == len(runs) and counts.min() > 1:
            figures[metric] = [
                as_svg(draw_curve(settings, own, metric, x, label), f"{metric} by {x}")
                for x, label in labels.items()
                if own[x].notna().all()
            ]
    return {words(metric): figures[metric] for metric in metrics if metric in figures}


def _render(**context: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("tread_zoo.comparison", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return environment.get_template("page.html.jinja").render(**context)


def _markdown(
    title: str,
    subtitle: str,
    command: str,
    headline: Sequence[str],
    scores: Table,
    pairs: Table,
    goals: Table,
    contributions: Sequence[tuple[str, list[tuple[float, bool]], list[str]]],
    notes: Sequence[str],
) -> str:
    lines = [f"# {as_markdown(title)}", "", f"{as_markdown(subtitle)}.", ""]
    lines += [f"- {as_markdown(text)}" for text in headline]
    lines += ["", "![quality against FLOPs](quality.png)", ""]
    strips = [
        [label, ", ".join(whole), " ".join(f"({v:.2f})" if r else f"{v:.2f}" for v, r in strip)]
        for label, strip, whole in contributions
    ]
    worth = (["output changes without", "blocks [start, end)", "each block; (routed)"], strips)
    for header, rows in (scores, pairs, goals, worth):
        if rows:
            table = (header, ["---"] * len(header), *rows)
            lines += [*("| " + " | ".join(map(as_markdown, cells)) + " |" for cells in table), ""]
    lines += [f"- {as_markdown(note)}" for note in notes]
    if command:
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", f"`{command}")))
        lines += ["", f"{fence}bash", command, fence]
    return "\n".join(lines).rstrip() + "\n"


def as_markdown(text: str) -> str:
    """Return `text` in one line as markdown that shows it as it is."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*|]|(?<![^\W_])_|_(?![^\W_])|\](?=\()", r"\\\g<0>", escaped)
