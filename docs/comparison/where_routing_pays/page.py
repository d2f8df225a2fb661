"""Draw the figure and fill in the tables of this page, from its .csv files.

python docs/comparison/where_routing_pays/page.py               # from those that are here
python docs/comparison/where_routing_pays/page.py comparisons   # read them off the runs first

A table stands between `<!-- name -->` and `<!-- end -->` in README.md.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd

from tread_zoo import comparison
from tread_zoo.comparison.findings import direction
from tread_zoo.comparison.intervals import Interval, differences, interval
from tread_zoo.evaluation.contribution import contribution_names
from tread_zoo.training.log import read_scores

HERE = Path(__file__).parent
SEVERAL = {  # of the study `evidence`, by what tells the folders: seeds, each with draws of noise
    "depth-5": "dense, 5 blocks",
    "depth-8": "dense, 8 blocks",
    "start-2": "routed",
    "routing-none": "dense",
}
ARMS = {  # what tells the folders of an arm, the first that fits: (name, colour)
    "routing-none": ("dense", "#2a7fd4"),
    "dense_tail-0.1": ("routed, dense tail", "#8a5fc7"),
    "start-5": ("routed [5, 9)", "#3aa66a"),
    "selection_rate-0.75": ("routed at 0.75", "#c24a72"),
    "start-3": ("routed [3, 10)", "#3aa66a"),
    "start-2": ("routed", "#e0731d"),
    "routing-tread": ("routed", "#e0731d"),
}
COLOURS = dict(ARMS.values())
INK = "#808080"  # reads on white and on black
STUDIES = {"curves": "where_routing_pays", "scan": "where_routing_pays_scan"}
BATCH_SIZE = 64
EQUAL_FLOPS = (  # an arm at these images, and dense at those
    ("routed", 768_000, 512_000),
    ("routed at 0.75", 768_000, 512_000),
    ("routed [5, 9)", 768_000, 640_000),
    ("routed", 1_536_000, 1_024_000),
    ("routed", 2_048_000, 1_536_000),
    ("routed, dense tail", 2_048_000, 1_536_000),
)
DIGITS = {"fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3}
EVALUATED = list(DIGITS)
SHOWN = ["fid", "precision", "recall", "label_accuracy"]
NAMES = "Fréchet distance | precision | recall | label accuracy"


def collect(comparisons: Path) -> None:
    """Write the .csv files from the runs of both studies, and the records that evaluate left in
    their folders."""
    rows = []
    for name, study in STUDIES.items():
        runs = sorted((comparisons / study / "runs").iterdir())
        curves = comparison.read_curves([str(run) for run in runs])
        tail = curves.folder.str.contains("dense_tail-0.1")  # up to it the routed run's
        curves = curves[(curves.source == "score") & ~(tail & (curves.step <= 28_800))]
        curves.to_csv(HERE / f"{name}.csv", index=False, float_format="%.6g")
        rows += [row for run in runs for row in draws_of(run)]
    keys = ["folder", "step", "scale", "selection_rate", "seed"]
    table = pd.DataFrame(rows).drop_duplicates(keys).sort_values(keys)
    table.to_csv(HERE / "evaluations.csv", index=False, float_format="%.6g")


def collect_seeds(study: Path) -> None:
    """Write evidence.csv: each score by training seed and draw, and what blocks are worth."""
    rows = []
    for run in sorted((study / "runs").iterdir()):
        records = [json.loads(file.read_text()) for file in run.glob("score_*.json")]
        for record in [*read_scores(run).values(), *records]:
            protocol, sampling = record["protocol"], record["protocol"]["sampling"]
            if sampling["guidance"] == "none" and sampling["selection_rate"] == 0:
                rows.append({
                    "arm": next(arm for key, arm in SEVERAL.items() if key in run.name),
                    "seed": json.loads((run / "config.json").read_text())["seed"],
                    "images": BATCH_SIZE * protocol["step"],
                    "draw": protocol["seed"],
                    **{metric: record["values"][metric] for metric in EVALUATED},
                    **contribution_names(record.get("contributions", {})),
                })  # fmt: skip
    # what was scored again comes last, and has the contributions
    table = pd.DataFrame(rows).drop_duplicates(["arm", "seed", "images", "draw"], keep="last")
    table.to_csv(HERE / "evidence.csv", index=False, float_format="%.6g")


def over_seeds(table: pd.DataFrame) -> str:
    """Return a table: each arm's mean ± standard deviation over training seeds, and 95 % intervals
    of the differences of equal seeds, the routed network's from each other one."""
    lines = [f"| images | | seeds | {NAMES} | without [2, 9) |", "|---" * 8 + "|"]
    for images, at in table.groupby("images"):
        groups = at.groupby("arm", sort=False)
        arms = {arm: scores.set_index(["seed", "draw"]) for arm, scores in groups}
        for arm, scores in arms.items():
            means = scores[EVALUATED].groupby(level=0).mean()
            worth = scores.get("contribution_2_9", pd.Series(dtype=float)).mean()
            lines.append(
                f"| {images // 1000}K | {arm} | {len(means)} | "
                f"{_with_spread(means.mean(), means.std())} | "
                f"{'' if pd.isna(worth) else f'{worth:.3f}'} |"
            )
        for arm in [arm for arm in arms if "routed" in arms and arm != "routed"]:
            by = pd.DataFrame({
                metric: differences(arms["routed"][metric], arms[arm][metric])
                for metric in SHOWN
            })  # fmt: skip
            if len(by):
                name = f"routed - ({arm})"
                lines.append(f"| {images // 1000}K | {name} | {len(by)} | {_judged(by)} | |")
    return "\n".join(lines)


def draws_of(run: Path) -> list[dict[str, Any]]:
    """Return the scores of a run's checkpoints that evaluate scored again, with the run's own."""
    others = [json.loads(file.read_text()) for file in run.glob("score_*.json")]
    steps = {record["protocol"]["step"] for record in others}
    rows = []
    for record in [r for r in read_scores(run).values() if r["protocol"]["step"] in steps] + others:
        protocol, sampling = record["protocol"], record["protocol"]["sampling"]
        rows.append({
            "folder": str(run),
            "step": protocol["step"],
            "scale": sampling["guidance_scale"],
            "selection_rate": sampling["selection_rate"],
            "seed": protocol["seed"],
            **{metric: record["values"][metric] for metric in EVALUATED},
        })  # fmt: skip
    return rows


def arm_of(folder: str) -> str:
    return next(arm for key, (arm, _) in ARMS.items() if key in folder)


def read_curves(name: str = "curves") -> pd.DataFrame:
    """Return every score of the runs with its arm, and the images that its run had seen."""
    return with_place(pd.read_csv(HERE / f"{name}.csv"))


def read_evaluations(name: str = "curves") -> pd.DataFrame:
    """Return the scores of single checkpoints by noise and guidance, densely sampled."""
    table = with_place(pd.read_csv(HERE / "evaluations.csv"))
    of_study = table.folder.str.contains(f"/{STUDIES[name]}/")
    return table[of_study & (table.selection_rate == 0)]


def with_place(table: pd.DataFrame) -> pd.DataFrame:
    return table.assign(arm=table.folder.map(arm_of), images=BATCH_SIZE * table.step)


def draws(evaluations: pd.DataFrame) -> dict[int, dict[str, pd.DataFrame]]:
    """Return the scores of each draw of the noise, by images and arm."""
    unguided = evaluations[evaluations.scale == 1]
    unguided = unguided.set_index("seed")[["images", "arm", *EVALUATED]]
    return {
        images: {arm: at[at.arm == arm][EVALUATED] for arm in COLOURS if arm in set(at.arm)}
        for images, at in unguided.groupby("images")
    }


def compared(name: str) -> Iterator[tuple[str, int, int, float, pd.DataFrame]]:
    """Yield what the page compares of a study: an arm, its images, those of the dense network, the
    ratio of their FLOPs, and the differences of equal draws, the arm less dense."""
    at, curves = draws(read_evaluations(name)), read_curves(name)
    spent = curves.groupby(["arm", "images"]).flops.mean()
    pairs = [(arm, images, images) for images, arms in at.items() for arm in list(arms)[1:]]
    for arm, images, of_dense in [*pairs, *(EQUAL_FLOPS if name == "curves" else ())]:
        by = at[images][arm] - at[of_dense]["dense"]
        yield arm, images, of_dense, spent[arm, images] / spent["dense", of_dense], by


def differences_of(name: str) -> str:
    """Return a table: arms less the dense network, at equal steps and at about equal FLOPs."""
    lines = [f"| | images | dense at | FLOPs | {NAMES} |", "|---" * 8 + "|"]
    for arm, images, of_dense, flops, by in compared(name):
        place = f"{arm} | {images // 1000}K | {of_dense // 1000}K | {flops:.2f}"
        lines.append(f"| {place} | {_judged(by)} |")
    return "\n".join(lines)


def means() -> pd.DataFrame:
    """Return mean and standard deviation of every score over the draws of its noise."""
    rows = []
    for name in STUDIES:
        table = read_evaluations(name)
        by = table.groupby(["folder", "arm", "images", "scale"])[EVALUATED]
        both = by.agg(["mean", "std", "count"])
        both.columns = [f"{metric}_{of}" for metric, of in both.columns]
        rows.append(both.reset_index())
    return pd.concat(rows)


def guided() -> str:
    """Return a table: the two networks, guided and not, less the unguided dense one, by draws."""
    evaluations = read_evaluations()
    both = evaluations[evaluations.arm.isin(["dense", "routed"])]
    names = both.arm + both.scale.map(lambda scale: "" if scale == 1 else f", guided by {scale:g}")
    lines = [f"| images | | less | {NAMES} |", "|---" * 7 + "|"]
    both = both.assign(name=names).set_index("seed")
    for images, at in both.groupby("images"):
        groups = {name: of[SHOWN] for name, of in at.groupby("name") if len(of) > 1}
        pairs = [("dense, guided by 1.1", "dense"), ("routed", "dense, guided by 1.1")]
        pairs += [("routed, guided by 1.1", "routed"), ("routed, guided by 1.1", pairs[0][0])]
        for one, other in pairs if pairs[0][0] in groups else ():
            cells = _judged((groups[one] - groups[other]).dropna())
            lines.append(f"| {images // 1000}K | {one} | {other} | {cells} |")
    return "\n".join(lines)


def answers() -> str:
    """Return a table: what the differences say of each question in Fréchet distance."""
    curves = {(a, i, d): by.fid for a, i, d, _, by in compared("curves")}
    scan = {(a, i, d): by.fid for a, i, d, _, by in compared("scan")}
    table = read_evaluations()
    at = table[(table.images == 1_024_000) & table.arm.isin(["dense", "routed"])]
    fid = {key: of.set_index("seed").fid for key, of in at.groupby(["arm", "scale"])}
    rows = [
        ("Is routing ahead at equal steps?", "1.0M images", curves["routed", 1_024_000, 1_024_000]),
        ("", "2.0M images", curves["routed", 2_048_000, 2_048_000]),
        ("At equal FLOPs?", "1.5M, dense at 1.0M", curves["routed", 1_536_000, 1_024_000]),
        ("", "2.0M, dense at 1.5M", curves["routed", 2_048_000, 1_536_000]),
        ("Of a dense network guided by 1.1?", "1.0M images", fid["routed", 1] - fid["dense", 1.1]),
        ("For a scan (`rwkv`)?", "768K images", scan["routed", 768_000, 768_000]),
    ]
    lines = ["| question | at | routed - dense | |", "|---" * 4 + "|"]
    for question, place, by in rows:
        of = interval(by.dropna())
        lines.append(f"| {question} | {place} | {_number(of, 2)} | {of.verdict('lower')} |")
    return "\n".join(lines)


def _with_spread(mean: pd.Series, spread: pd.Series) -> str:
    """Return mean ± standard deviation of each score; of one value the value."""
    return " | ".join(
        f"{mean[m]:.{DIGITS[m]}f}" + ("" if pd.isna(spread[m]) else f" ± {spread[m]:.{DIGITS[m]}f}")
        for m in SHOWN
    )


def _judged(by: pd.DataFrame) -> str:
    """Return the 95 % interval of each score's differences, bold where it is settled."""
    cells = []
    for metric in SHOWN:
        of = interval(by[metric].dropna())
        verdict, text = of.verdict(direction(metric) or "lower"), _number(of, DIGITS[metric])
        cells.append(text if verdict == "not settled" else f"**{text}** {verdict}")
    return " | ".join(cells)


def _number(of: Interval, digits: int) -> str:
    return f"{of.mean:+.{digits}f} ± {of.half:.{digits}f}"


def draw() -> None:
    """Draw the differences by images, the distances by FLOPs, and precision against recall."""
    style = {"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    with plt.rc_context({**style, "xtick.color": INK, "ytick.color": INK, "font.size": 11}):
        figure, axes = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained")
        draw_differences(axes[0])
        draw_distances(axes[1])
        draw_plane(axes[2])
        for axis in axes:
            axis.grid(alpha=0.25)
            axis.patch.set_alpha(0)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(HERE / "figure.png", transparent=True, dpi=100)


def draw_differences(axis: plt.Axes) -> None:
    """Draw each arm's distance less that of dense at equal steps, with its 95 % interval."""
    arms = [(f"dit, {a}", COLOURS[a], i, by) for a, i, d, _, by in compared("curves") if i == d]
    arms += [("rwkv, routed", "#777777", i, by) for a, i, _, _, by in compared("scan")
             if a == "routed"]  # fmt: skip
    labels = list(dict.fromkeys(label for label, *_ in arms))
    for label, colour, images, by in arms:
        of, shift = interval(by.fid.dropna()), 1 + 0.02 * labels.index(label)
        first = axis.get_legend_handles_labels()[1].count(label) == 0
        axis.errorbar(
            images / 1e6 * shift, of.mean, of.half, fmt="o", ms=5, capsize=2, color=colour,
            label=label if first else None,
        )  # fmt: skip
    axis.axhline(0, color=INK, lw=1)
    axis.set(xlabel="million images", ylabel="Fréchet distance, less dense", ylim=(-0.6, 1.15))
    axis.set_title("at equal steps; below 0 routing is ahead")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_distances(axis: plt.Axes) -> None:
    """Draw the mean distance over draws of each arm by the FLOPs that it took."""
    curves, at = read_curves(), draws(read_evaluations())
    spent = curves.groupby(["arm", "images"]).flops.mean()
    for arm, colour in COLOURS.items():
        points = [(spent[arm, i], arms[arm].fid) for i, arms in at.items() if arm in arms]
        if points:
            x, y = zip(*points, strict=True)
            means, spread = [v.mean() for v in y], [v.std() for v in y]
            axis.errorbar(x, means, spread, fmt=".-", color=colour, capsize=2, label=arm)
    axis.set(xlabel="training FLOPs", ylabel="Fréchet distance")
    axis.set_title("mean and standard deviation of four draws")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def draw_plane(axis: plt.Axes) -> None:
    """Draw precision and recall as images go by, and what guidance does to them."""
    table = means()
    table = table[table.arm.isin(["dense", "routed"]) & ~table.folder.str.contains("scan")]
    for arm, path in table[table.scale == 1].sort_values("images").groupby("arm"):
        axis.plot(path.precision_mean, path.recall_mean, ".-", color=COLOURS[arm], label=arm)
        last = path.iloc[-1]
        axis.plot(last.precision_mean, last.recall_mean, "o", ms=8, color=COLOURS[arm])
    several = table[(table.scale > 1) & (table.fid_count > 1)]
    for row in several.itertuples():
        start = table[(table.scale == 1) & (table.folder == row.folder)]
        start = start[start.images == row.images].iloc[0]
        axis.annotate(
            "", (row.precision_mean, row.recall_mean), (start.precision_mean, start.recall_mean),
            arrowprops={"arrowstyle": "->", "color": COLOURS[row.arm]},
        )  # fmt: skip
    axis.set(xlabel="precision", ylabel="recall")
    axis.set_title("as images go by; arrows: guided by 1.1")
    axis.legend(frameon=False, labelcolor=INK, fontsize=9)


def tables() -> dict[str, str]:
    """Return every table of the page by its name."""
    seeds = HERE / "evidence.csv"
    return {
        "answers": answers(),
        "seeds": over_seeds(pd.read_csv(seeds)) if seeds.exists() else "",
        "dit": differences_of("curves"),
        "guided": guided(),
        "scan": differences_of("scan"),
    }


def filled(text: str) -> str:
    """Return the page with its tables."""
    for name, table in tables().items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.S)
    return text


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if (Path(sys.argv[1]) / "where_routing_pays").exists():
            collect(Path(sys.argv[1]))
        if (Path(sys.argv[1]) / "evidence").exists():
            collect_seeds(Path(sys.argv[1]) / "evidence")
    means().to_csv(HERE / "means.csv", index=False, float_format="%.4g")
    draw()
    page = HERE / "README.md"
    page.write_text(filled(page.read_text()))
