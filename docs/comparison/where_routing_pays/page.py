"""Draw curves.png and print the tables of this page, from its curves.csv and evaluations.csv.

python docs/comparison/where_routing_pays/page.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

HERE = Path(__file__).parent
ARMS = {  # what tells the folders of an arm: (name, colour)
    "routing-none": ("dense", "#2a7fd4"),
    "start-2": ("routed", "#e0731d"),
}
COLOURS = dict(ARMS.values())
BATCH_SIZE = 64
SPEED = {"dense": 163, "routed": 215}  # images/s of one thread with nothing beside it
DIGITS = {
    "fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3, "held_out_loss": 4,
}  # fmt: skip
NAMES = "Fréchet distance | kernel distance | precision | recall | label accuracy"


def read_curves() -> pd.DataFrame:
    """Return every score of the runs with its arm, and the images that its run had seen."""
    curves = pd.read_csv(HERE / "curves.csv").query("source == 'score'")
    arms = [next(arm for key, (arm, _) in ARMS.items() if key in f) for f in curves.folder]
    return curves.assign(arm=arms, images=BATCH_SIZE * curves.step)


def read_evaluations() -> pd.DataFrame:
    """Return the scores of single checkpoints: other noise, guidance, more samples."""
    evaluations = pd.read_csv(HERE / "evaluations.csv")
    return evaluations.assign(images=BATCH_SIZE * evaluations.step)


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


def spread_of_draws(evaluations: pd.DataFrame) -> str:
    """Return a table: mean ± standard deviation of scores over draws of the noise, and the mean of
    the differences of equal draws ± its standard error."""
    draws = evaluations[(evaluations.scale == 1) & (evaluations.num_images == 1000)]
    metrics = list(DIGITS)[:-1]
    lines = [f"| images | | {NAMES} |", "|---" * 7 + "|"]
    for images, own in draws.groupby("images"):
        dense, routed = (own[own.arm == arm].set_index("seed")[metrics] for arm in SPEED)
        both = routed - dense
        name = f"{images // 1000}K"
        for arm, mean, spread, sign in (
            ("dense", dense.mean(), dense.std(), ""),
            ("routed", routed.mean(), routed.std(), ""),
            ("difference", both.mean(), both.sem(), "+"),
        ):
            cells = [
                f"{mean[m]:{sign}.{n}f} ± {spread[m]:.{n}f}"
                for m, n in DIGITS.items()
                if m in metrics
            ]
            lines.append(f"| {name} | {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def guided(evaluations: pd.DataFrame) -> str:
    """Return a table: what guidance of some scales makes of the two networks, on equal noise."""
    metrics = ("fid", "precision", "recall", "label_accuracy")
    lines = ["| images | | scale | Fréchet distance | precision | recall | label accuracy |"]
    lines.append("|---" * 7 + "|")
    own = evaluations[(evaluations.seed == 1) & (evaluations.num_images == 1000)]
    own = own[own.images.isin(own[own.scale > 1].images)]
    for row in own.sort_values(["images", "arm", "scale"]).itertuples():
        cells = [_show(getattr(row, metric), DIGITS[metric]) for metric in metrics]
        place = f"{row.images // 1000}K | {row.arm} | {row.scale:g}"
        lines.append(f"| {place} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _show(value: float | None, digits: int, sign: str = "") -> str:
    return "" if value is None or np.isnan(value) else f"{value:{sign}.{digits}f}"


def _between(x: float, xs: pd.Index | pd.Series, ys: pd.Series) -> float:
    """Return the line through (xs, ys) at x; nan outside of it."""
    return float(np.interp(x, xs, ys, left=np.nan, right=np.nan))


def draw(curves: pd.DataFrame, evaluations: pd.DataFrame) -> None:
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    fid, loss = (curves[curves.metric == metric] for metric in ("fid", "held_out_loss"))
    draw_curves(axes[0], fid, "images", "images", "Fréchet distance")
    draw_curves(axes[1], fid, "flops", "training FLOPs", "Fréchet distance")
    draw_curves(axes[2], loss, "images", "images", "held-out loss")
    draw_plane(axes[3], curves, evaluations)
    axes[0].legend(frameon=False)
    figure.savefig(HERE / "curves.png", dpi=80)


def draw_curves(axis: plt.Axes, rows: pd.DataFrame, x: str, label: str, name: str) -> None:
    for arm, own in rows.groupby("arm"):
        at = own.groupby("step").agg(
            x=(x, "mean"), y=("value", "mean"), low=("value", "min"), high=("value", "max")
        )
        axis.plot(at.x, at.y, ".-", color=COLOURS[arm], label=arm)
        axis.fill_between(at.x, at.low, at.high, color=COLOURS[arm], alpha=0.15, lw=0)
    axis.set(xlabel=label, ylabel=name)
    axis.grid(alpha=0.25)


def draw_plane(axis: plt.Axes, curves: pd.DataFrame, evaluations: pd.DataFrame) -> None:
    """Draw how precision and recall move as images go by, and with guidance."""
    for arm, own in curves.groupby("arm"):
        at = own.pivot_table(index="step", columns="metric", values="value")
        axis.plot(at.precision, at.recall, ".-", color=COLOURS[arm])
        axis.plot(at.precision.iloc[-1], at.recall.iloc[-1], "o", color=COLOURS[arm], ms=8)
    for arm, own in evaluations[evaluations.scale > 1].groupby("arm"):
        axis.plot(own.precision, own.recall, "x", color=COLOURS[arm])
        for row in own.itertuples():
            axis.annotate(f" {row.scale:g}", (row.precision, row.recall), fontsize=8)
    axis.set(xlabel="precision", ylabel="recall", title="as images go by; x: guided")
    axis.grid(alpha=0.25)


def tables() -> list[str]:
    """Return every table of the page."""
    curves, evaluations = read_curves(), read_evaluations()
    return [
        scores_by_images(curves),
        distance_at_equal_cost(curves),
        loss_by_level(curves),
        spread_of_draws(evaluations),
        guided(evaluations),
    ]


if __name__ == "__main__":
    draw(read_curves(), read_evaluations())
    print("\n\n".join(tables()))
