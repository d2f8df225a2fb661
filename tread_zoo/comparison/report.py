"""The report of a comparison: CSV, markdown and one HTML page that needs no other file."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from tread_zoo.comparison.figures import DASHES, as_svg, draw_curve, draw_quality, looks
from tread_zoo.comparison.findings import Findings, Setting, direction, find, words
from tread_zoo.config import flatten


def write_report(
    runs: pd.DataFrame,
    curves: pd.DataFrame,
    out: Path,
    *,
    title: str,
    command: str = "",
    metric: str | None = None,
    failed: Mapping[str, str] | None = None,
) -> str:
    """Write `index.html`, `report.md`, `results.csv`, `curves.csv` and `quality.png` to the folder
    `out`, and return the markdown.

    Args:
        runs, curves: of `read_runs` and `read_curves`.
        out: folder.
        title: first line.
        command: what made the runs, or "".
        metric: what the first screen is about; None takes the first score that all runs have.
        failed: why runs have no row, by name.

    Raises:
        ValueError: no run was scored, or the runs have no score that compares.
    """
    findings = find(runs, curves, metric, failed)
    out.mkdir(parents=True, exist_ok=True)
    real = findings.runs.get(f"real_{findings.main}", pd.Series(dtype=float)).dropna()
    quality = draw_quality(
        findings.settings,
        findings.main,
        direction(findings.main) or "lower",
        "flops_per_sample" if findings.by_sample else "flops",
        real.iloc[0] if len(real) else None,
    )
    quality.savefig(out / "quality.png", dpi=120, facecolor="white")
    runs.drop(columns=["protocol", "samples"]).to_csv(out / "results.csv", index=False)
    curves.to_csv(out / "curves.csv", index=False)
    about = {"title": title, "subtitle": _count(findings), "command": command}
    text = _markdown(about, findings)
    (out / "report.md").write_text(text)
    style = looks(findings.settings).items()
    page = _render(
        **about,
        findings=findings,
        quality=as_svg(quality, f"{words(findings.main)} against FLOPs"),
        samples={} if findings.by_sample else _samples(findings.settings),
        figures={} if findings.by_sample else _curve_figures(findings, curves),
        legend=[(label, colour, DASHES.get(dash, "━━━")) for label, (colour, dash) in style],
        machines=list(dict.fromkeys(findings.runs.machine.dropna())),
        protocol=flatten(findings.runs.protocol.iloc[0] or {}),
    )
    (out / "index.html").write_text(page)
    return text


def _count(findings: Findings) -> str:
    counts = {
        "setting": len(findings.settings),
        "backbone": len({setting.backbone for setting in findings.settings}),
        "run": len(findings.runs),
    }
    first, second, third = (f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items())
    return f"{first} of {second}, {third}, on {' and '.join(sorted(set(findings.runs.data)))}"


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


def _embed(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _curve_figures(findings: Findings, curves: pd.DataFrame) -> dict[str, list[str]]:
    """Return by metric its figures against steps, FLOPs and seconds, of all that every run measured
    more than once on its way."""
    labels = {"step": "steps", "flops": "training FLOPs", "seconds": "seconds of training steps"}
    if findings.runs.machine.nunique() > 1:
        del labels["seconds"]  # of several clocks
    figures: dict[str, list[str]] = {}
    of_runs = curves[curves.folder.isin(findings.runs.folder)]
    for (_, metric), own in of_runs.groupby(["source", "metric"], sort=False):
        counts = own.groupby("folder").step.nunique()
        if metric in findings.metrics and len(counts) == len(findings.runs) and counts.min() > 1:
            figures[words(metric)] = [
                as_svg(draw_curve(findings.settings, own, metric, x, label), f"{metric} by {x}")
                for x, label in labels.items()
                if own[x].notna().all()
            ]
    return {words(m): figures[words(m)] for m in findings.metrics if words(m) in figures}


def _render(**context: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("tread_zoo.comparison", "")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    return environment.get_template("page.html.jinja").render(**context)


def _markdown(about: Mapping[str, str], findings: Findings) -> str:
    lines = [f"# {about['title']}", "", f"{about['subtitle']}.", ""]
    lines += [f"- {text}" for text in findings.headline]
    lines += ["", "![quality against FLOPs](quality.png)", ""]
    for header, rows in (findings.scores, findings.pairs):
        if rows:
            table = (header, ["---"] * len(header), *rows)
            lines += [*("| " + " | ".join(cells) + " |" for cells in table), ""]
    lines += [f"- {note}" for note in findings.notes]
    if about["command"]:
        lines += ["", "```bash", about["command"], "```"]
    return "\n".join(lines).rstrip() + "\n"
