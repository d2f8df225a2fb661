"""Draw the curves and print the tables of this page, from its .csv files.

python docs/comparison/where_routing_pays/page.py               # from those that are here
python docs/comparison/where_routing_pays/page.py comparisons   # read them off the runs first
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd

from tread_zoo import comparison
from tread_zoo.comparison.findings import direction
from tread_zoo.comparison.intervals import differences, interval
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
SPEED = {"dense": 163, "routed": 215}  # images/s of one thread with nothing beside it
DIGITS = {
    "fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3, "held_out_loss": 4,
}  # fmt: skip
EVALUATED = list(DIGITS)[:-1]
NAMES = "Fréchet distance | kernel distance | precision | recall | label accuracy"


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
    lines = [f"| images | | seeds | {NAMES} | without [2, 9) |", "|---" * 9 + "|"]
    for images, at in table.groupby("images"):
        arms = {arm: own.set_index(["seed", "draw"]) for arm, own in at.groupby("arm", sort=False)}
        for arm, own in arms.items():
            means = own[EVALUATED].groupby(level=0).mean()
            worth = own.get("contribution_2_9", pd.Series(dtype=float)).mean()
            lines.append(
                f"| {images // 1000}K | {arm} | {len(means)} | "
                f"{_with_spread(means.mean(), means.std())} | {_show(worth, 3)} |"
            )
        for arm in [arm for arm in arms if "routed" in arms and arm != "routed"]:
            by = pd.DataFrame({
                metric: differences(arms["routed"][metric], arms[arm][metric])
                for metric in EVALUATED
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


def loss_by_level(curves: pd.DataFrame) -> str:
    """Return a table: the held-out losses of the fourths of the levels at the last common point,
    from the least noise to the most."""
    at = curves.pivot_table(index="images", columns=["metric", "arm"], values="value")
    last = at.dropna(subset=[("fid", arm) for arm in SPEED]).iloc[-1]
    names = [f"held_out_loss_{i}" for i in range(1, 5)]
    lines = [f"| {last.name // 1000}K images | least noise | | | most noise |", "|---" * 5 + "|"]
    rows = [[last[name, arm] for name in names] for arm in SPEED]
    for arm, losses in zip(SPEED, rows, strict=True):
        lines.append(f"| {arm} | {' | '.join(_show(loss, 4) for loss in losses)} |")
    shares = [f"{100 * (b / a - 1):+.1f} %" for a, b in zip(*rows, strict=True)]
    lines.append(f"| difference | {' | '.join(shares)} |")
    return "\n".join(lines)


def draws(evaluations: pd.DataFrame) -> dict[int, dict[str, pd.DataFrame]]:
    """Return the scores of each draw of the noise, by images and arm."""
    own = evaluations[evaluations.scale == 1]
    own = own.set_index("seed")[["images", "arm", *EVALUATED]]
    return {
        images: {arm: at[at.arm == arm][EVALUATED] for arm in COLOURS if arm in set(at.arm)}
        for images, at in own.groupby("images")
    }


def spread_of_draws(evaluations: pd.DataFrame) -> str:
    """Return a table: mean ± standard deviation of scores over draws of the noise; and the 95 %
    interval of the differences of equal draws, each arm less dense, with its verdict."""
    lines = [f"| images | | {NAMES} |", "|---" * 7 + "|"]
    for images, arms in draws(evaluations).items():
        rows = [(arm, _with_spread(own.mean(), own.std())) for arm, own in arms.items()]
        rows += [(f"{a} - dense", _judged(arms[a] - arms["dense"])) for a in list(arms)[1:]]
        lines += [f"| {images // 1000}K | {name} | {cells} |" for name, cells in rows]
    return "\n".join(lines)


def draws_at_equal_flops(curves: pd.DataFrame, evaluations: pd.DataFrame) -> str:
    """Return a table: arms less the dense network that had spent about as much, by draws."""
    at, spent = draws(evaluations), curves.groupby(["arm", "images"]).flops.mean()
    lines = [f"| | images | of dense | FLOPs | {NAMES} |", "|---" * 9 + "|"]
    for arm, images, of_dense in EQUAL_FLOPS:
        by = at[images][arm] - at[of_dense]["dense"]
        share = spent[arm, images] / spent["dense", of_dense]
        place = f"{arm} | {images // 1000}K | {of_dense // 1000}K | {share:.2f}"
        lines.append(f"| {place} | {_judged(by)} |")
    return "\n".join(lines)


def guided(evaluations: pd.DataFrame) -> str:
    """Return a table: what guidance of some scales makes of the two networks, the mean of the draws
    of the noise that all of them have; and for several draws the 95 % intervals of differences."""
    metrics = ["fid", "precision", "recall", "label_accuracy"]
    lines = ["| images | | draws | Fréchet distance | precision | recall | label accuracy |"]
    lines.append("|---" * 7 + "|")
    own = evaluations[evaluations.arm.isin(list(SPEED))]
    names = own.arm + own.scale.map(lambda scale: "" if scale == 1 else f", {scale:g}")
    own = own.assign(name=names).set_index("seed")
    for images in own[own.scale > 1].images.unique():
        groups = {name: of[metrics] for name, of in own[own.images == images].groupby("name")}
        common = sorted(set.intersection(*(set(of.index) for of in groups.values())))
        place = f"| {images // 1000}K | {{}} | {len(common)} | {{}} |"
        for name, of in groups.items():
            mean = of.loc[common].mean()
            lines.append(place.format(name, " | ".join(_show(mean[m], DIGITS[m]) for m in metrics)))
        if len(common) > 1:
            for name in ("routed", "routed, 1.1"):
                by = groups[name].loc[common] - groups["dense, 1.1"].loc[common]
                lines.append(place.format(f"({name}) - (dense, 1.1)", _judged(by)))
    return "\n".join(lines)


def _with_spread(mean: pd.Series, spread: pd.Series) -> str:
    """Return mean ± standard deviation of each score; of one value the value."""
    return " | ".join(
        f"{mean[m]:.{n}f}" + ("" if pd.isna(spread[m]) else f" ± {spread[m]:.{n}f}")
        for m, n in DIGITS.items()
        if m in mean
    )


def _judged(by: pd.DataFrame) -> str:
    """Return the 95 % interval of each score's differences, with its verdict."""
    cells = []
    for metric in by:
        own, n = interval(by[metric].dropna()), DIGITS[metric]
        verdict = own.verdict(direction(metric) or "lower")
        cells.append(f"{own.mean:+.{n}f} ± {own.half:.{n}f}, {verdict}")
    return " | ".join(cells)


def _show(value: float | None, digits: int, sign: str = "") -> str:
    return "" if value is None or pd.isna(value) else f"{value:{sign}.{digits}f}"


def draw() -> None:
    curves, evaluations, scan = read_curves(), read_evaluations(), read_curves("scan")
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.6), layout="constrained")
    fid, loss = (curves[curves.metric == metric] for metric in ("fid", "held_out_loss"))
    draw_curves(axes[0, 0], fid, "images", "images", "Fréchet distance")
    draw_means(axes[0, 0], evaluations)
    draw_curves(axes[0, 1], fid, "flops", "training FLOPs", "Fréchet distance")
    draw_curves(axes[0, 2], loss, "images", "images", "held-out loss")
    draw_plane(axes[1, 0], curves, evaluations)
    draw_curves(axes[1, 1], scan[scan.metric == "fid"], "images", "images", "Fréchet distance")
    draw_curves(
        axes[1, 2], scan[scan.metric == "held_out_loss"], "images", "images", "held-out loss"
    )
    for axis in (axes[0, 0], axes[1, 1]):
        axis.legend(frameon=False)
    for axis in axes[1, 1:]:
        axis.set(title="a scan: rwkv")
    figure.savefig(HERE / "curves.png", dpi=80)


def draw_curves(axis: plt.Axes, rows: pd.DataFrame, x: str, label: str, name: str) -> None:
    for arm in [arm for arm in COLOURS if arm in set(rows.arm)]:
        at = (
            rows[rows.arm == arm]
            .groupby("step")
            .agg(x=(x, "mean"), y=("value", "mean"), low=("value", "min"), high=("value", "max"))
        )
        axis.plot(at.x, at.y, ".-", color=COLOURS[arm], label=arm)
        axis.fill_between(at.x, at.low, at.high, color=COLOURS[arm], alpha=0.15, lw=0)
    axis.set(xlabel=label, ylabel=name)
    axis.ticklabel_format(axis="x", scilimits=(0, 0))
    axis.grid(alpha=0.25)


def draw_means(axis: plt.Axes, evaluations: pd.DataFrame) -> None:
    """Draw the mean over draws of the noise, and its standard deviation."""
    for images, arms in draws(evaluations).items():
        for arm, own in arms.items():
            place = images + 12_000 * list(COLOURS).index(arm)  # side by side
            axis.errorbar(
                place, own.fid.mean(), own.fid.std(), fmt="o", color=COLOURS[arm], ms=5, capsize=2
            )


def draw_plane(axis: plt.Axes, curves: pd.DataFrame, evaluations: pd.DataFrame) -> None:
    """Draw how precision and recall move as images go by, and with guidance."""
    for arm in SPEED:
        at = curves[curves.arm == arm].pivot_table(index="step", columns="metric", values="value")
        axis.plot(at.precision, at.recall, ".-", color=COLOURS[arm])
        axis.plot(at.precision.iloc[-1], at.recall.iloc[-1], "o", color=COLOURS[arm], ms=8)
    at_same_noise = evaluations[(evaluations.scale > 1) & (evaluations.seed == 1)]
    for arm, own in at_same_noise.groupby("arm"):
        axis.plot(own.precision, own.recall, "x", color=COLOURS[arm])
        for row in own.itertuples():
            axis.annotate(f" {row.scale:g}", (row.precision, row.recall), fontsize=8)
    axis.set(xlabel="precision", ylabel="recall", title="as images go by; x: guided")
    axis.grid(alpha=0.25)


def tables() -> list[str]:
    """Return every table of the page."""
    curves, evaluations = read_curves(), read_evaluations()
    seeds = HERE / "evidence.csv"
    return [
        *([over_seeds(pd.read_csv(seeds))] if seeds.exists() else []),
        spread_of_draws(evaluations),
        draws_at_equal_flops(curves, evaluations),
        loss_by_level(curves),
        guided(evaluations),
        spread_of_draws(read_evaluations("scan")),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        if (Path(sys.argv[1]) / "where_routing_pays").exists():
            collect(Path(sys.argv[1]))
        if (Path(sys.argv[1]) / "evidence").exists():
            collect_seeds(Path(sys.argv[1]) / "evidence")
    draw()
    print("\n\n".join(tables()))
