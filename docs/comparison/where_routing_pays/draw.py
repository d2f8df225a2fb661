"""Draw curves.png of this folder from its curves.csv and evaluations.csv.

python docs/comparison/where_routing_pays/draw.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import pandas as pd

HERE = Path(__file__).parent
COLOURS = {"dense": "#2a7fd4", "routed": "#e0731d"}


def main() -> None:
    curves = pd.read_csv(HERE / "curves.csv")
    curves["arm"] = curves.folder.str.contains("routing-none").map({True: "dense", False: "routed"})
    curves["images"] = 64 * curves.step
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.4), layout="constrained")
    draw(axes[0], curves[curves.metric == "fid"], "images", "images", "Fréchet distance")
    draw(axes[1], curves[curves.metric == "fid"], "flops", "training FLOPs", "Fréchet distance")
    loss = curves[curves.metric == "held_out_loss"]
    draw(axes[2], loss, "images", "images", "held-out loss")
    draw_plane(axes[3], curves, pd.read_csv(HERE / "evaluations.csv"))
    axes[0].legend(frameon=False)
    figure.savefig(HERE / "curves.png", dpi=80)


def draw(axis: plt.Axes, rows: pd.DataFrame, x: str, label: str, name: str) -> None:
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
    guided = evaluations[evaluations.scale > 1]
    for arm, own in guided.groupby("arm"):
        axis.plot(own.precision, own.recall, "x", color=COLOURS[arm])
        for row in own.itertuples():
            axis.annotate(f" {row.scale:g}", (row.precision, row.recall), fontsize=8)
    axis.set(xlabel="precision", ylabel="recall", title="as images go by; x: guided")
    axis.grid(alpha=0.25)


if __name__ == "__main__":
    main()
