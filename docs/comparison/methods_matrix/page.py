"""The table of routing methods on a scan, and the figure of what each block is worth.

python docs/comparison/tables.py methods_matrix RUNS    # adds a folder of runs to digits/blocks.csv
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from tables import markdown

from tread_zoo.comparison.intervals import Interval, Ratio, log_ratio
from tread_zoo.comparison.results import read_table

HERE = Path(__file__).parent
PAGES = (HERE / "README.md",)
DIGITS, BLOCKS = HERE / "digits" / "results.csv", HERE / "digits" / "blocks.csv"
DENSE = "dense, depth 12"
WORDS = {"ahead": "better", "behind": "worse"}  # of a distance


def add(runs: str) -> None:
    """Add what the blocks of ended runs are worth, in place of rows of the same runs. Names of
    shallower networks end with their depth, as in results.csv."""
    rows = []
    for file in sorted(Path(runs).glob("*/score.json")):
        record = json.loads(file.read_text())["contributions"]
        depth = json.loads(file.with_name("config.json").read_text())["backbone"]["depth"]
        name = file.parent.name + (f"_depth-{depth}" if depth < 12 else "")
        spans = [(block, block) for block in range(len(record["blocks"]))]
        spans += [(start, end - 1) for start, end, _ in record["ranges"]]
        for (first, last), rise in zip(spans, record["loss_rises"], strict=True):
            rows.append({"run": name, "first": first, "last": last, "loss_rise": rise})
    table = pd.DataFrame(rows).drop_duplicates(["run", "first", "last"])  # ranges of one block
    if BLOCKS.exists():
        old = pd.read_csv(BLOCKS)
        table = pd.concat([old[~old.run.isin(table.run)], table])
    table = table.sort_values("run", kind="stable")
    table.to_csv(BLOCKS, index=False, float_format="%.5g")


def scan_runs() -> pd.DataFrame:
    """Return the runs of mamba_tiny, with the columns `name` and `arm`, a method or a depth."""
    runs = read_table(DIGITS).query("backbone == 'mamba_tiny'")
    dense = [f"dense, depth {depth:.0f}" for depth in runs["backbone.depth"]]
    arms = np.where(runs.routing == "none", dense, runs.routing)
    return runs.assign(name=[Path(folder).name for folder in runs.folder], arm=arms)


def tables() -> dict[str, str]:
    """Return the table of methods: distance, its ratio to that of the dense network, and what all
    routed blocks are worth."""
    runs, rows = scan_runs(), []
    worth = routed_ranges().groupby("run").loss_rise.first()
    by_arm = {arm: of.set_index("seed") for arm, of in runs.groupby("arm")}
    for arm, own in sorted(by_arm.items(), key=lambda each: each[1].fid.mean()):
        rises = 100 * worth.reindex(own.name).dropna()
        ends = [f"{rise:.{0 if rise > 9.5 else 1}f}" for rise in (rises.min(), rises.max())]
        is_shallow = arm.startswith("dense") and arm != DENSE
        shown = "" if is_shallow or rises.empty else f"{ends[0]} to {ends[1]} %"
        over = "1" if arm == DENSE else verdict(by_arm, arm)
        label = arm if arm.startswith("dense") else f"`{arm}`"
        price = own.flops_per_sample.mean() / by_arm[DENSE].flops_per_sample.mean()
        cells = [label, len(own), f"{own.fid.mean():.2f}", over, f"{own.label_accuracy.mean():.3f}"]
        rows.append([*cells, shown, f"{price:.2f}"])
    head = "| `mamba_tiny`, digits | seeds | Fréchet distance | over that of the dense network "
    head += "| label accuracy | the loss rises without all routed blocks by | price of a sample |"
    return {"scan": markdown(head, rows)}


def verdict(by_arm: dict[str, pd.DataFrame], arm: str) -> str:
    """Return the ratio of an arm's distance to the dense network's, its interval, and a verdict. If
    the kernel distance has another one, that is added."""
    fid, kid = (log_of(by_arm, arm, metric) for metric in ("fid", "kid"))
    said, other = (log.verdict("lower") for log in (fid, kid))
    text = f"{Ratio(fid).in_brackets()}, {WORDS.get(said, said)}"
    return text if said == other else f"{text}; by the kernel distance {WORDS.get(other, other)}"


def log_of(by_arm: dict[str, pd.DataFrame], arm: str, metric: str) -> Interval:
    """Return the logarithm of the ratio: by seed for networks of equal depth, else Welch's."""
    return log_ratio(by_arm[arm][metric], by_arm[DENSE][metric], paired="depth" not in arm)


def routed_ranges() -> pd.DataFrame:
    """Return the rows of ranges of several blocks: all blocks that a method routes, or that it
    would route by default."""
    return pd.read_csv(BLOCKS).query("last > first")


def draw() -> None:
    """Draw what each block is worth, a plot for each arm and a line for each seed."""
    runs, blocks = scan_runs(), pd.read_csv(BLOCKS)
    single, ranges = blocks.query("last == first"), routed_ranges().groupby("run").first()
    means = runs.groupby("arm").fid.mean()
    shown = [arm for arm in means.sort_values().index if not arm.startswith("dense")]
    shown = [DENSE, *shown]
    with plt.rc_context({"svg.hashsalt": "tread_zoo", "svg.fonttype": "none", "font.size": 8}):
        figure, grid = plt.subplots(
            3, 3, figsize=(7.2, 5.4), sharex=True, sharey=True, layout="constrained"
        )
        for axis, arm in zip(grid.flat, shown, strict=False):
            for name in runs[runs.arm == arm].name:
                own = single[single.run == name]
                axis.plot(own["first"], 100 * own.loss_rise, ".-", color="C0", linewidth=0.8)
            if arm == "mixture_of_depths":  # every second block
                spans = [(block, block) for block in range(1, 12, 2)]
            else:
                spans = [] if arm == DENSE else [tuple(ranges.loc[name, ["first", "last"]])]
            for first, last in spans:
                axis.axvspan(first - 0.5, last + 0.5, color="C1", alpha=0.2, linewidth=0)
            axis.set_title(f"{arm} ({means[arm]:.2f})", fontsize=9)
            axis.axhline(0, color="grey", linewidth=0.5)
            axis.set_yscale("symlog", linthresh=1)
            axis.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
            axis.spines[["top", "right"]].set_visible(False)
        figure.supxlabel("block", fontsize=9)
        figure.supylabel("the loss rises without the block by, %", fontsize=9)
        figure.savefig(HERE / "digits" / "blocks.svg", metadata={"Date": None})
        plt.close(figure)
