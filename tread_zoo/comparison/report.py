"""The report of a comparison: CSV, markdown, figures and one HTML page that needs no other file."""

import base64
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

import tread_zoo.comparison.figures as draw
import tread_zoo.comparison.findings as findings
from tread_zoo.comparison.findings import Row, Setting, Table
from tread_zoo.comparison.intervals import Ratio
from tread_zoo.comparison.results import write_table
from tread_zoo.config import flatten
from tread_zoo.data.files import printable, without_paths, write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 3  # samples of a run in the first table, cut from its grid


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
    """Write `index.html`, `report.md`, `results.csv`, `curves.csv`, `quality.png` and
    `figures/*.svg` to the folder `out`, and return the markdown.

    Args:
        runs, curves: from `read_runs` and `read_curves`. If a run has several rows, one for each
            guidance or sampler, costs are those of sampling, not of training.
        out: the folder.
        title: the first line.
        command: the command that made the runs, or "".
        metric: the score by which settings are ranked; None: the first one that all runs have,
            a distance (lower is better) if there is one.
        failed: from `run_cells`: why runs failed, by name, for the notes.

    Raises:
        ValueError: no run was scored, or the runs share no score or not `metric`.
    """
    ended, metrics, notes = _comparable(runs, failed or {})
    if metric is not None and metric not in metrics:
        raise ValueError(f"compare.metric={metric} must be one of {', '.join(metrics)}.")
    main, settings = metric or metrics[0], findings.group_settings(ended)
    by_sample = bool(ended.folder.duplicated().any())
    rows = findings.make_rows(
        settings, curves, main, ["steps"] if by_sample else list(findings.BUDGETS)
    )
    lines = [line for row in rows for line in row.lines]
    settings = list({line.setting.label: line.setting for line in lines}.values())  # best first
    apart = [less for line in lines for _, less in line.less]
    budgets = [axis for axis in findings.BUDGETS if any(less.get(axis) for less in apart)]
    out.mkdir(parents=True, exist_ok=True)
    write_table(runs.drop(columns=["protocol", "samples"]), out / "results.csv")
    write_table(curves, out / "curves.csv")
    ordered = sorted(metrics, key=lambda name: name != main)
    figures = _figures(settings, rows, ordered, curves, by_sample=by_sample)
    ratios = _ratios(settings, metrics, main) if not by_sample else ([], {})
    about: dict[str, Any] = without_paths({
        "title": title,
        "subtitle": _count(settings, ended),
        "command": command,
        "overview": findings.overview_table(rows, main, budgets),
        "ratios": findings.ratio_table(*ratios, main),
        "scores": findings.scores_table(settings, metrics),
        "contributions": [] if by_sample else findings.contribution_table(settings),
        "notes": notes,
    })  # fmt: skip
    page = _page(rows, settings, ended, main, budgets)
    page |= {"figures": {n: draw.as_svg(f, n) for n, f in figures.items()}, "heat": ratios}
    page["by_sample"] = by_sample
    environment = Environment(
        loader=PackageLoader("tread_zoo.comparison", ""), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    html = environment.get_template("page.html.jinja").render(**about, **page)
    write_text(out / "index.html", html)
    _save_figures(figures, settings, out)
    text = _markdown(**about)
    write_text(out / "report.md", text)
    return text


def _comparable(
    runs: pd.DataFrame, failed: Mapping[str, str]
) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Return the finished runs without duplicates, the names of their common scores, and notes on
    all that is left out. `failed` says why runs failed, by name."""
    ended = runs[runs.ended]
    if not len(ended):
        raise ValueError("No run has been scored: there is nothing to compare.")
    again = ended.astype(str).duplicated([*ended.attrs["settings"], "seed"])
    repeated, ended = ended[again], ended[~again]
    metrics, notes = findings.comparable_metrics(ended)
    notes += [f"{name} failed: {reason}" for name, reason in failed.items()]
    notes += [f"{name} has the settings and seed of another run." for name in repeated.folder]
    going = runs[~runs.ended].itertuples()
    notes += [f"{run.folder} is at step {run.steps}, not scored." for run in going]
    return ended, metrics, notes


def _ratios(
    settings: Sequence[Setting], metrics: Sequence[str], main: str
) -> tuple[list[str], dict[str, list[Ratio | None]]]:
    """Return `ratios_to_dense` for `main`, the score by which settings are ranked, and the first
    other distance in `metrics`. Both results are empty unless lower values of `main` are better."""
    if findings.direction(main) != "lower":
        return [], {}
    others = [name for name in metrics if name != main and findings.is_distance(name)]
    return findings.ratios_to_dense(settings, [main, *others[:1]])


def _count(settings: Sequence[Setting], runs: pd.DataFrame) -> str:
    num_backbones = len({setting.backbone for setting in settings})
    counts = {"setting": len(settings), "backbone": num_backbones, "run": len(runs)}
    first, second, third = (f"{n} {word}{'s' * (n != 1)}" for word, n in counts.items())
    return f"{first} of {second}, {third}, on {' and '.join(sorted(set(runs.data)))}"


def _figures(
    settings: Sequence[Setting],
    rows: Sequence[Row],
    metrics: Sequence[str],
    curves: pd.DataFrame,
    *,
    by_sample: bool,
) -> "dict[str, Figure]":
    """Return the figures by name.

        difference …       routed minus dense during training, for each pair of settings
        plane              precision against recall
        quality            the first of `metrics`, by which settings are ranked, against the cost
        ranking            instead of `quality`, if all settings cost the same
        curve …            a metric during training, for each one that all runs scored

    Dense settings are those without routes. `by_sample` says that settings differ in sampling, not
    in training. Costs are then those of sampling, and there are no figures of the training.
    """
    figures: dict[str, Figure] = {}
    style, main = draw.looks(settings), metrics[0]
    pairs = {}
    for name, line in ((row.name, line) for row in rows for line in row.lines):
        if line.less and not line.is_at_chance and not by_sample:
            dense = line.less[0][0]
            table = findings.differences_on_the_way(line.setting, dense, curves, main)
            if len(table) > 1:
                pairs[name, line.setting.label] = table
    limits = draw.Axis.over([one for table in pairs.values() for one in table.interval], 0)
    for (name, label), table in pairs.items():
        figures[f"difference {name}"] = draw.draw_lines({name: (style[label], table)}, name, limits)
    if {"precision", "recall"} <= set(metrics):
        figures["plane"] = draw.draw_plane(settings, "precision", "recall", arrows=not by_sample)
    cost = "flops_per_sample" if by_sample else "flops"
    spent = pd.concat([setting.runs[cost] for setting in settings])
    if spent.max() <= spent.min() * (1 + findings.SAME):
        figures["ranking"] = draw.draw_ranking(settings, main)
    else:
        figures["quality"] = draw.draw_plane(settings, main, cost, arrows=not by_sample)
    for metric in () if by_sample else metrics:
        lines = {s.label: (style[s.label], findings.curve(s, curves, metric)) for s in settings}
        if all(len(table) > 1 for _, table in lines.values()):
            figures[f"curve {metric}"] = draw.draw_lines(lines, findings.metric_with_arrow(metric))
    return figures


def _save_figures(figures: "Mapping[str, Figure]", settings: Sequence[Setting], out: Path) -> None:
    picture = figures.get("quality") or figures["ranking"]
    picture.savefig(out / "quality.png", dpi=120, facecolor="white")
    (out / "figures").mkdir(exist_ok=True)
    for name, figure in figures.items():
        if not name.startswith(("difference", "ranking")):
            draw.add_legend(figure, settings)
        file = re.sub(r"[^\w.=-]+", "_", without_paths(name)) + ".svg"
        write_text(out / "figures" / file, draw.as_svg(figure, name, alone=True))


def _page(
    rows: Sequence[Row],
    settings: Sequence[Setting],
    runs: pd.DataFrame,
    metric: str,
    budgets: Sequence[str],
) -> dict[str, Any]:
    """Return the HTML page's template variables that the markdown report does not have. `metric` is
    the score by which settings are ranked, `budgets` the names in `findings.BUDGETS` to show."""
    real = runs.get(f"real_{metric}", pd.Series([float("nan")])).iloc[0]
    lines = [line for row in rows for line in row.lines if not line.is_at_chance]
    apart = [one for line in lines for _, less in line.less for one in less.values() if one]
    cost = "flops_per_sample" if runs.folder.duplicated().any() else "parameters"
    return {
        "rows": rows,
        "metric": metric,
        "better": findings.direction(metric) or "lower",
        "is_ranked": metric != findings.HELD_OUT,
        "real": real,
        "axis": draw.Axis.over([line.score for line in lines], real),
        "apart": draw.Axis.over(apart, 0.0),
        "budgets": {axis: findings.BUDGETS[axis] for axis in budgets},
        "missing": any(None in less.values() for line in lines for _, less in line.less),
        "has_shallower": any(len(line.less) > 1 for line in lines),
        "cost": cost,
        "number": {setting.label: i for i, setting in enumerate(settings)},
        "pictures": _pictures(settings),
        "legend": {look.number: look for look in draw.looks(settings).values()},
        "machines": list(dict.fromkeys(runs.machine.dropna())),
        "protocol": without_paths(flatten(runs.protocol.iloc[0] or {})),
        "configs": without_paths(_configs(runs)),
        "with_si_prefix": findings.with_si_prefix,
        "cost_label": findings.COSTS[cost],
        "metric_label": findings.metric_label,
        "metric_with_arrow": findings.metric_with_arrow,
    }


def _pictures(settings: Sequence[Setting]) -> dict[str, tuple[str, str]]:
    """Return by label two pictures of each setting's samples, as data URLs: the whole grid, and its
    first three images. The samples are those of the first seed that all settings have. If a run has
    pictures of real images, they are added as `real images`."""
    common = sorted(set.intersection(*(set(setting.runs.seed) for setting in settings)))[:1]
    pictures: dict[str, tuple[str, str]] = {}
    for setting in settings:
        runs = setting.runs.sort_values("seed")
        path = Path((runs[runs.seed.isin(common or runs.seed)].samples.iloc[0]) or "none")
        real = path.with_name("real.png")
        if real.exists() and "real images" not in pictures:
            pictures = {"real images": _embed(real), **pictures}
        if path.exists():
            pictures[setting.label] = _embed(path)
    return pictures


def _embed(path: Path) -> tuple[str, str]:
    from PIL import Image

    stream = io.BytesIO()
    with Image.open(path) as picture:
        # written by `save_grid`; older pictures have ten rows and ten columns
        rows, columns, top = map(int, picture.info.get("grid", "10 10 0").split())
        width = (picture.width - 2) // columns  # a sample and its margin
        height = (picture.height - top - 2) // rows
        picture.crop((0, 0, SHOWN * width + 2, top + height + 2)).save(stream, "PNG")
    whole, part = (base64.b64encode(b).decode() for b in (path.read_bytes(), stream.getvalue()))
    return f"data:image/png;base64,{whole}", f"data:image/png;base64,{part}"


def _configs(runs: pd.DataFrame) -> dict[str, Any]:
    """Return a dict of `runs`, the names of the runs, and `values`: by name of setting, where any
    two runs differ in it, a list of every run's value as JSON."""
    folders = list(dict.fromkeys(runs.folder))
    files = [Path(folder) / "config.json" for folder in folders]
    flat = [
        flatten(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
        for file in files
    ]
    names = dict.fromkeys(name for one in flat for name in one if name != "run_dir")
    texts = {name: [json.dumps(one.get(name)) for one in flat] for name in names}
    differ = {name: values for name, values in texts.items() if len(set(values)) > 1}
    return {"runs": [Path(folder).name for folder in folders], "values": differ}


def _markdown(
    title: str,
    subtitle: str,
    command: str,
    overview: Table,
    scores: Table,
    ratios: Table,
    contributions: Sequence[tuple[str, list[tuple[float, bool]], list[str]]],
    notes: Sequence[str],
) -> str:
    lines = [f"# {as_markdown(title)}", "", f"{as_markdown(subtitle)}.", ""]
    strips = [
        [label, ", ".join(whole), " ".join(f"({v:.2f})" if r else f"{v:.2f}" for v, r in strip)]
        for label, strip, whole in contributions
    ]
    worth = (["output changes without", "blocks [start, end)", "each block; (routed)"], strips)
    for number, (header, rows) in enumerate((overview, scores, ratios, worth)):
        if rows:
            table = (header, ["---"] * len(header), *rows)
            lines += [*("| " + " | ".join(map(as_markdown, cells)) + " |" for cells in table), ""]
        if not number:
            lines += ["![quality and cost](quality.png)", ""]
    lines += [f"- {as_markdown(note)}" for note in notes]
    if command:
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", f"`{command}")))
        lines += ["", f"{fence}bash", command, fence]
    return "\n".join(lines).rstrip() + "\n"


def as_markdown(text: str) -> str:
    """Return `text` as one line of markdown that shows it literally."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"[\\`*|]|(?<![^\W_])_|_(?![^\W_])|\](?=\()", r"\\\g<0>", escaped)
