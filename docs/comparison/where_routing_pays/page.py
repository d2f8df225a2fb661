"""Draw the curves and print the tables of this page, from its three .csv files.

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
import numpy as np
import pandas as pd

from tread_zoo import comparison
from tread_zoo.training.log import read_scores

HERE = Path(__file__).parent
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


def scores_by_images(curves: pd.DataFrame) -> str:
    """Return a table: dense / routed at each number of images, the mean of the seeds."""
    at = curves.pivot_table(index="images", columns=["metric", "arm"], values="value")
    lines = [f"| images | {NAMES} | held-out loss |", "|---" * 7 + "|"]
    for images, row in at.iterrows():
        pairs = [
            " / ".join(_show(row.get((metric, arm)), n) for arm in ("dense", "routed"))
            for metric, n in DIGITS.items()
        ]
        lines.append(f"| {images // 1000}K | {' | '.join(pairs)} |")
    return "\n".join(lines)


def distance_at_equal_cost(curves: pd.DataFrame) -> str:
    """Return a table: the routed run's distance less the dense one's, read between its scores, at
    equal images, FLOPs and seconds."""
    fid = curves[curves.metric == "fid"]
    dense, routed = (
        fid[fid.arm == arm].groupby("images")[["value", "flops"]].mean() for arm in SPEED
    )
    lines = ["| images of the routed run | equal images | equal FLOPs | equal seconds |"]
    lines.append("|---" * 4 + "|")
    seconds = dense.index / SPEED["dense"]
    for images, row in routed.iterrows():
        others = (
            _between(images, dense.index, dense.value),
            _between(row.flops, dense.flops, dense.value),
            _between(images / SPEED["routed"], seconds, dense.value),
        )
        cells = " | ".join(_show(row.value - other, 2, sign="+") for other in others)
        lines.append(f"| {images // 1000}K | {cells} |")
    return "\n".join(lines)


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
    """Return a table: mean ± standard deviation of scores over draws of the noise; and the mean of
    the differences of equal draws, each arm less dense, ± its standard error."""
    lines = [f"| images | | {NAMES} |", "|---" * 7 + "|"]
    for images, arms in draws(evaluations).items():
        rows = [(arm, own.mean(), own.std(), "") for arm, own in arms.items()]
        for arm in list(arms)[1:]:
            by = arms[arm] - arms["dense"]
            rows.append((f"{arm} - dense", by.mean(), by.sem(), "+"))
        for name, mean, spread, sign in rows:
            lines.append(f"| {images // 1000}K | {name} | {_with_spread(mean, spread, sign)} |")
    return "\n".join(lines)


def draws_at_equal_flops(curves: pd.DataFrame, evaluations: pd.DataFrame) -> str:
    """Return a table: arms less the dense network that had spent about as much, by draws."""
    at, spent = draws(evaluations), curves.groupby(["arm", "images"]).flops.mean()
    lines = [f"| | images | of dense | FLOPs | {NAMES} |", "|---" * 9 + "|"]
    for arm, images, of_dense in EQUAL_FLOPS:
        by = at[images][arm] - at[of_dense]["dense"]
        share = spent[arm, images] / spent["dense", of_dense]
        place = f"{arm} | {images // 1000}K | {of_dense // 1000}K | {share:.2f}"
        lines.append(f"| {place} | {_with_spread(by.mean(), by.sem(), '+')} |")
    return "\n".join(lines)


def samples_to_settle(evaluations: pd.DataFrame) -> str:
    """Return a table: the samples of each network, in thousands, that make the difference of the
    routed and the dense one twice its standard error."""
    lines = [f"| images | {NAMES} |", "|---" * 6 + "|"]
    for images, arms in draws(evaluations).items():
        if "routed" not in arms:
            continue
        by = arms["routed"] - arms["dense"]
        needed = np.ceil((2 * by.std() / by.mean()) ** 2)
        cells = ("over 100" if needed[m] > 100 else f"{needed[m]:.0f}" for m in EVALUATED)
        lines.append(f"| {images // 1000}K | {' | '.join(cells)} |")
    return "\n".join(lines)


def guided(evaluations: pd.DataFrame) -> str:
    """Return a table: what guidance of some scales makes of the two networks, the mean of the draws
    of the noise that all of them have; and for several draws what routing is ahead of, ± the
    standard error."""
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
                cells = _with_spread(by.mean(), by.sem(), "+")
                lines.append(place.format(f"({name}) - (dense, 1.1)", cells))
    return "\n".join(lines)


def _with_spread(mean: pd.Series, spread: pd.Series, sign: str) -> str:
    return " | ".join(
        f"{mean[m]:{sign}.{DIGITS[m]}f} ± {spread[m]:.{DIGITS[m]}f}" for m in mean.index
    )


def _show(value: float | None, digits: int, sign: str = "") -> str:
    return "" if value is None or np.isnan(value) else f"{value:{sign}.{digits}f}"


def _between(x: float, xs: pd.Index | pd.Series, ys: pd.Series) -> float:
    """Return the line through (xs, ys) at x; nan outside of it."""
    return float(np.interp(x, xs, ys, left=np.nan, right=np.nan))


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
    return [
        spread_of_draws(evaluations),
        draws_at_equal_flops(curves, evaluations),
        samples_to_settle(evaluations),
        scores_by_images(curves),
        distance_at_equal_cost(curves),
        loss_by_level(curves),
        guided(evaluations),
        scores_by_images(read_curves("scan")),
        spread_of_draws(read_evaluations("scan")),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        collect(Path(sys.argv[1]))
    draw()
    print("\n\n".join(tables()))
