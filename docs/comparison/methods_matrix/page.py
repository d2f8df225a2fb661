"""The table of routing methods on a scan, and the figure of what each block is worth.

python docs/comparison/tables.py methods_matrix RUNS    # adds a folder of runs to digits/blocks.csv
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from remake import read_records
from tables import corrected, markdown, p_value

from tread_zoo.comparison.findings import (
    Setting,
    group_settings,
    ratio_table,
    ratios_to_dense,
)

HERE = Path(__file__).parent
PAGES = (HERE / "README.md",)
BACKBONE, DIGITS = "mamba_tiny", HERE / "digits"
BLOCKS = DIGITS / "blocks.csv"


def add(runs: str) -> None:
    """Add what the blocks of ended runs are worth, in place of rows of the same runs. Names of
    shallower networks end with their depth, as in results.csv."""
    rows = []
    for file in sorted(Path(runs).glob("*/score.json")):
        record = json.loads(file.read_text())["contributions"]
        depth = json.loads(file.with_name("config.json").read_text())["backbone"]["depth"]
        name = file.parent.name + (f"_depth-{depth}" if depth < 12 else "")
        ranges = [(start, end - 1) for start, end, _ in record["ranges"]]
        spans = [*((block, block) for block in range(len(record["blocks"]))), *ranges]
        for (first, last), rise in zip(spans, record["loss_rises"], strict=True):
            routed = any(start <= first and last <= end for start, end in ranges)
            rows.append((name, first, last, routed, rise))
    table = pd.DataFrame(rows, columns=["run", "first", "last", "routed", "loss_rise"])
    table = table.drop_duplicates(["run", "first", "last"])  # a range of one block is there twice
    if BLOCKS.exists():
        old = pd.read_csv(BLOCKS)
        table = pd.concat([old[~old.run.isin(table.run)], table])
    table.sort_values("run", kind="stable").to_csv(BLOCKS, index=False, float_format="%.5g")


def settings_by_name(folder: Path = DIGITS, backbone: str = BACKBONE) -> dict[str, Setting]:
    """Return the settings of a backbone by method or, without routes, by depth."""
    found = (s for s in group_settings(read_records(folder)) if s.backbone == backbone)
    return {setting.label.removeprefix(backbone).strip(): setting for setting in found}


def blocks_of(setting: Setting) -> pd.DataFrame:
    """Return the rows of blocks.csv for the runs of a setting."""
    blocks = pd.read_csv(BLOCKS)
    return blocks[blocks.run.isin(Path(folder).name for folder in setting.runs.folder)]


def tables() -> dict[str, str]:
    """Return the table of methods: distance, its ratio to that of the dense network, and what all
    routed blocks are worth."""
    settings, rows = settings_by_name(), []
    _, ratios = ratio_table(*ratios_to_dense([*settings.values()], ["fid", "kid"]), "fid")
    over = {"dense": "1", **dict(ratios)}
    price_of_dense = settings["dense"].runs.flops_per_sample.mean()
    for name, setting in sorted(settings.items(), key=lambda each: each[1].runs.fid.mean()):
        rises = blocks_of(setting).query("last > first").loss_rise
        ends = [f"{100 * rise:.{0 if rise > 0.095 else 1}f}" for rise in (rises.min(), rises.max())]
        is_shallow = setting.is_dense and name != "dense"
        shown = "" if rises.empty or is_shallow else f"{ends[0]} to {ends[1]} %"
        price = setting.runs.flops_per_sample.mean() / price_of_dense
        cells = [name if setting.is_dense else f"`{name}`", len(setting.runs)]
        cells += [f"{setting.runs.fid.mean():.2f}", over[name]]
        rows.append([*cells, f"{setting.runs.label_accuracy.mean():.3f}", shown, f"{price:.2f}"])
    head = "| `mamba_tiny`, digits | seeds | Fréchet distance | over that of the dense network "
    head += "| label accuracy | the loss rises without all routed blocks by | price of a sample |"
    return {"scan": markdown(head, rows), "attention": attention()}


def attention() -> str:
    """Return the table of the eight methods with attention: the distance over that of the dense
    network, with Holm's correction. Of the settings of a method, the paper's is taken."""
    settings = settings_by_name(HERE, "dit_tiny")
    _, ratios = ratios_to_dense([*settings.values()], ["fid", "kid"])
    left_out = ("tread, selection_rate [linear", "random_ltd, selection_rate 0.5", "dense")
    shown = {name: row[0] for name, row in ratios.items() if not name.startswith(left_out)}
    values = corrected(p_value(ratio.log) for ratio in shown.values())
    texts = dict(ratio_table(["dit_tiny"], ratios, "fid")[1])
    return markdown(
        "| `dit_tiny`, Fashion-MNIST | seeds | Fréchet distance over that of the dense network "
        "| p, with Holm's correction for eight |",
        (
            [f"`{name.partition(',')[0]}`", ratio.log.n, texts[name], f"{p:.2f}"]
            for (name, ratio), p in zip(shown.items(), values, strict=True)
        ),
    )


def draw() -> None:
    """Draw what each block is worth, a plot for each method and a line for each seed."""
    settings = settings_by_name()
    means = {name: setting.runs.fid.mean() for name, setting in settings.items()}
    shown = sorted((name for name in means if not settings[name].is_dense), key=means.get)
    with plt.rc_context({"svg.hashsalt": "tread_zoo", "svg.fonttype": "none", "font.size": 8}):
        figure, grid = plt.subplots(
            3, 3, figsize=(7.2, 5.4), sharex=True, sharey=True, layout="constrained"
        )
        for axis, name in zip(grid.flat, ["dense", *shown], strict=True):
            single = blocks_of(settings[name]).query("last == first")
            for _, own in single.groupby("run"):
                axis.plot(own["first"], 100 * own.loss_rise, ".-", color="C0", linewidth=0.8)
            for block in set(single.query("routed")["first"]) if name in shown else ():
                axis.axvspan(block - 0.5, block + 0.5, color="C1", alpha=0.2, linewidth=0)
            axis.set_title(f"{name} ({means[name]:.2f})", fontsize=9)
            axis.axhline(0, color="grey", linewidth=0.5)
            axis.set_yscale("symlog", linthresh=1)
            axis.set_xticks([0, 5, 10])
            axis.set_yticks([0, 1, 10, 100], ["0", "1", "10", "100"])
            axis.spines[["top", "right"]].set_visible(False)
        figure.supxlabel("block", fontsize=9)
        figure.supylabel("the loss rises without the block by, %", fontsize=9)
        figure.savefig(DIGITS / "blocks.svg", metadata={"Date": None})
        plt.close(figure)
