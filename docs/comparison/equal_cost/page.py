"""Fill in the tables of this page from its .csv files, a row a scored run.

python docs/comparison/equal_cost/page.py               # from the records
python docs/comparison/equal_cost/page.py RUNS STUDY    # add a folder of runs to STUDY.csv first

A table stands between `<!-- study -->` and `<!-- end -->`.
"""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from tread_zoo.comparison.intervals import Interval, log_ratio

HERE = Path(__file__).parent
BASE = "dense 12"
PRICES = {"dense 9": 0.75, "dense 6": 0.5}  # of a sample, over that of 12 blocks
ARMS = {
    "dense 6": "dense, 6 blocks", "dense 9": "dense, 9 blocks", BASE: "dense, 12 blocks",
    "routed 12": "routed, 12 blocks", "layer dropout 12": "layer dropout, 12 blocks",
}  # fmt: skip
STUDIES = {"digits": "digits, 16 tokens", "fashion_mnist": "Fashion-MNIST, 64 tokens"}
PAGES = (HERE / "README.md", HERE.parents[1] / "results.md", HERE.parents[2] / "README.md")
METRICS = ["fid", "kid", "precision", "recall", "label_accuracy"]


def collect(folder: Path) -> pd.DataFrame:
    """Return a row for each score of the finished runs in a folder."""
    rows = []
    for run in sorted(path.parent for path in folder.glob("*/score.json")):
        config = json.loads((run / "config.json").read_text())
        with (run / "commands.jsonl").open() as stream:
            start = json.loads(stream.readline())
        for file in sorted(run.glob("score*.json")):
            record = json.loads(file.read_text())
            device = record.get("run", {}).get("device", "")
            protocol, values = record["protocol"], record["values"]
            rows.append({
                "arm": arm_of(config), "seed": config["seed"],
                "learning_rate": config["optimizer"]["learning_rate"],
                "steps": protocol["step"], "draw": protocol["seed"],
                "guidance": protocol["sampling"]["guidance_scale"],
                **{metric: values[metric] for metric in METRICS},
                "held_out_loss": values.get("held_out_loss"),
                "code": start["code"].split()[-1][:7],
                "machine": f"{machine()}, {device}".rstrip(", "),
            })  # fmt: skip
    return pd.DataFrame(rows)


def arm_of(config: dict[str, Any]) -> str:
    """Return the arm that a run's settings make."""
    routing, depth = config["routing"], config["backbone"]["depth"]
    # Before it was a method: all tokens but two skip the range, in every second step.
    is_dropout = routing["name"] == "layer_drop" or routing.get("selection_rate") == 0.98
    name = "dense" if routing["name"] == "none" else "layer dropout" if is_dropout else "routed"
    return f"{name} {depth}"


def machine() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def table(rows: pd.DataFrame) -> str:
    """Return a Markdown table: each arm's mean over seeds, and its distance over that of dense
    networks of 12 blocks."""
    by_arm = means_by_arm(rows)
    lines = [
        "| equal FLOPs of training | seeds | Fréchet distance | over that of 12 dense blocks "
        "| kernel distance | label accuracy | price of a sample |",
        "|---" * 7 + "|",
    ]
    for arm, means in sorted(by_arm.items(), key=lambda each: each[1].fid.mean()):
        cells = [f"{math.exp(means.fid.map(math.log).mean()):.2f}"]
        cells.append("1" if arm == BASE else in_percent(ratio(by_arm, arm)) + dissent(by_arm, arm))
        cells += [f"{means.kid.mean():.3f}", f"{means.label_accuracy.mean():.3f}"]
        lines.append(
            f"| {arm} blocks | {len(means)} | {' | '.join(cells)} | {PRICES.get(arm, 1)} |"
        )
    return "\n".join(lines)


def read(study: str) -> pd.DataFrame:
    """Return the scores of a study."""
    return pd.read_csv(HERE / f"{study}.csv")


def means_by_arm(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return each arm's unguided scores by seed, means over draws of samples."""
    plain = rows[rows.guidance == 1]
    return {arm: of.groupby("seed")[METRICS].mean() for arm, of in plain.groupby("arm")}


def answer() -> str:
    """Return the Markdown table of all studies: each arm's distance, and what it is over that of 12
    dense blocks."""
    studies = {title: means_by_arm(read(study)) for study, title in STUDIES.items()}
    lines = [
        f"| equal FLOPs of training | {' | '.join(studies)} | price of a sample |",
        "|---" * (2 + len(studies)) + "|",
    ]
    for arm in ARMS:
        cells = []
        for by_arm in studies.values():
            if arm not in by_arm:
                cells.append("")
                continue
            fid = by_arm[arm].fid
            cell = f"{math.exp(fid.map(math.log).mean()):.2f}, n = {len(fid)}"
            cells.append(
                cell
                if arm == BASE
                else f"{cell}: {in_words(ratio(by_arm, arm))}{dissent(by_arm, arm)}"
            )
        lines.append(f"| {ARMS[arm]} | {' | '.join(cells)} | {PRICES.get(arm, 1)} |")
    return "\n".join(lines)


def in_words(log: Interval) -> str:
    """Return a ratio's verdict, and how much of the other's distance that is."""
    if math.isinf(log.half):
        return "one seed"
    verdict = log.verdict("lower")
    low, high = (100 * (math.exp(end) - 1) for end in (log.low, log.high))
    if verdict == "not settled":
        return f"{_unsettled(log)} ({low:+.0f} to {high:+.0f} %)"
    word = {"ahead": "better", "behind": "worse"}[verdict]
    near, far = sorted((abs(low), abs(high)))
    return f"**{word}** by {100 * abs(math.exp(log.mean) - 1):.0f} % ({near:.0f} to {far:.0f})"


def _unsettled(log: Interval) -> str:
    """Return `level` if an interval around 0 excludes a difference of a quarter, either way."""
    return "level" if max(-log.low, log.high) < math.log(1.25) else "not settled"


def draw(file: Path) -> None:
    """Draw each arm's ratio to 12 dense blocks, with its interval, a colour for each study."""
    with plt.rc_context({"svg.hashsalt": "tread_zoo", "svg.fonttype": "none"}):
        figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
        arms = [arm for arm in ARMS if arm != BASE][::-1]
        for shift, (study, title) in enumerate(STUDIES.items()):
            by_arm = means_by_arm(read(study))
            logs = {arm: ratio(by_arm, arm) for arm in arms if arm in by_arm}
            logs = {arm: log for arm, log in logs.items() if not math.isinf(log.half)}
            if not logs:
                continue
            middles = [math.exp(log.mean) for log in logs.values()]
            ends = [
                [math.exp(log.mean) - math.exp(log.low) for log in logs.values()],
                [math.exp(log.high) - math.exp(log.mean) for log in logs.values()],
            ]
            heights = [arms.index(arm) - 0.12 + 0.24 * (1 - shift) for arm in logs]
            axis.errorbar(middles, heights, xerr=ends, fmt="o", capsize=3, label=title)
        axis.axvline(1, color="grey", linewidth=1)
        axis.set_xscale("log")
        axis.margins(0.15)
        axis.set_xticks([0.5, 0.6, 0.8, 1, 1.2, 1.5], ["0.5", "0.6", "0.8", "1", "1.2", "1.5"])
        axis.minorticks_off()
        axis.set_yticks(range(len(arms)), [ARMS[arm] for arm in arms])
        axis.set_xlabel("distance over that of 12 dense blocks; left is better")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(file, metadata={"Date": None})
        plt.close(figure)


def rates(rows: pd.DataFrame) -> str:
    """Return a Markdown table: each arm's scores at each learning rate, of one seed and two draws
    of samples."""
    lines = [
        "| equal FLOPs of training | learning rate | Fréchet distance | kernel distance "
        "| label accuracy | held-out loss | Fréchet distance, guided by 1.5 |",
        "|---" * 7 + "|",
    ]
    for (arm, rate), own in rows.groupby(["arm", "learning_rate"]):
        plain, guided = (own[own.guidance == scale].mean(numeric_only=True) for scale in (1, 1.5))
        cells = [f"{plain.fid:.2f}", f"{plain.kid:.2f}", f"{plain.label_accuracy:.3f}"]
        cells += [f"{plain.held_out_loss:.3f}", f"{guided.fid:.2f}"]
        lines.append(f"| {arm} blocks | {rate:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def ratio(
    by_arm: dict[str, pd.DataFrame], arm: str, other: str = BASE, metric: str = "fid"
) -> Interval:
    """Return the logarithm of the ratio of two arms' distances: by seed for networks of equal
    depth, whose initial weights are the same."""
    paired = (arm in PRICES) == (other in PRICES)
    return log_ratio(by_arm[arm][metric], by_arm[other][metric], paired=paired)


def dissent(by_arm: dict[str, pd.DataFrame], arm: str) -> str:
    """Return what the kernel distance says of an arm where it does not share the verdict."""
    fid, kid = (ratio(by_arm, arm, metric=metric) for metric in ("fid", "kid"))
    if math.isinf(kid.half) or kid.verdict("lower") == fid.verdict("lower"):
        return ""
    word = {"ahead": "better", "behind": "worse"}.get(kid.verdict("lower"), _unsettled(kid))
    return f"; by the kernel distance {word}"


def in_percent(log: Interval) -> str:
    """Return a ratio and the ends of its interval: "1.02 (0.90 to 1.15)", and a verdict."""
    if math.isinf(log.half):
        return f"{math.exp(log.mean):.2f}, one seed"
    low, high = math.exp(log.low), math.exp(log.high)
    text = f"{math.exp(log.mean):.2f} ({low:.2f} to {high:.2f})"
    words = {"ahead": "better", "behind": "worse", "not settled": _unsettled(log)}
    word = words[log.verdict("lower")]
    return f"{text}, {word}"


def filled(text: str) -> str:
    """Return a page with its tables made from the records."""
    text = re.sub(
        r"(<!-- answer -->\n)(?:.*?\n)?(<!-- end -->)",
        lambda m: f"{m[1]}{answer()}\n{m[2]}", text, flags=re.DOTALL,
    )  # fmt: skip
    for file in HERE.glob("*.csv"):
        pattern = rf"(<!-- {file.stem} -->\n)(?:.*?\n)?(<!-- end -->)"
        if re.search(pattern, text, re.DOTALL):
            make = rates if file.stem == "rates" else table
            rows = make(pd.read_csv(file)) + "\n"
            text = re.sub(pattern, lambda m, rows=rows: m[1] + rows + m[2], text, flags=re.DOTALL)
    return text


def main() -> None:
    if len(sys.argv) == 3:
        rows = pd.concat([read(sys.argv[2]), collect(Path(sys.argv[1]))])
        rows = rows.drop_duplicates(
            ["arm", "seed", "learning_rate", "draw", "guidance"], keep="last"
        )
        rows.to_csv(HERE / f"{sys.argv[2]}.csv", index=False)
    draw(HERE / "ratios.svg")
    for page in PAGES:
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
