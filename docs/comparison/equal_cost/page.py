"""Fill in the tables of this page from its .csv files, a row a scored run.

python docs/comparison/equal_cost/page.py               # from the records
python docs/comparison/equal_cost/page.py RUNS STUDY    # read a folder of runs into STUDY.csv first

Runs lie in RUNS/<arm>_s<seed>; a table stands between `<!-- study -->` and `<!-- end -->`.
"""

import json
import math
import re
import sys
from pathlib import Path

import pandas as pd

from tread_zoo.comparison.intervals import Interval, log_ratio

HERE = Path(__file__).parent
BASE = "dense 12"
PRICES = {"dense 9": 0.75, "dense 6": 0.5}  # of a sample, over that of 12 blocks
METRICS = ["fid", "kid", "precision", "recall", "label_accuracy"]


def collect(folder: Path) -> pd.DataFrame:
    """Return a row for each score of the finished runs in a folder."""
    rows = []
    for run in sorted(path.parent for path in folder.glob("*_s*/score.json")):
        arm, _, seed = run.name.rpartition("_s")
        config = json.loads((run / "config.json").read_text())
        with (run / "commands.jsonl").open() as stream:
            start = json.loads(stream.readline())
        for file in sorted(run.glob("score*.json")):
            record = json.loads(file.read_text())
            device = record.get("run", {}).get("device", "")
            protocol, values = record["protocol"], record["values"]
            rows.append({
                "arm": arm.replace("_", " ").partition(" lr")[0], "seed": int(seed),
                "learning_rate": config["optimizer"]["learning_rate"],
                "steps": protocol["step"], "draw": protocol["seed"],
                "guidance": protocol["sampling"]["guidance_scale"],
                **{metric: values[metric] for metric in METRICS},
                "held_out_loss": values.get("held_out_loss"),
                "code": start["code"].split()[-1][:7],
                "machine": f"{machine()}, {device}".rstrip(", "),
            })  # fmt: skip
    return pd.DataFrame(rows)


def machine() -> str:
    """Return the name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def table(rows: pd.DataFrame) -> str:
    """Return a Markdown table: each arm's mean over seeds, and its distance over that of dense
    networks of 12 blocks."""
    plain = rows[rows.guidance == 1]
    by_arm = {
        arm: of.groupby("seed")[METRICS].mean() for arm, of in plain.groupby("arm", sort=False)
    }
    lines = [
        "| equal FLOPs of training | seeds | Fréchet distance | over that of 12 dense blocks "
        "| kernel distance | label accuracy | price of a sample |",
        "|---" * 7 + "|",
    ]
    for arm, means in sorted(by_arm.items(), key=lambda each: each[1].fid.mean()):
        cells = [f"{math.exp(means.fid.map(math.log).mean()):.2f}"]
        cells.append("1" if arm == BASE else in_percent(ratio(by_arm, arm)))
        cells += [f"{means.kid.mean():.3f}", f"{means.label_accuracy.mean():.3f}"]
        lines.append(
            f"| {arm} blocks | {len(means)} | {' | '.join(cells)} | {PRICES.get(arm, 1)} |"
        )
    return "\n".join(lines)


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


def ratio(by_arm: dict[str, pd.DataFrame], arm: str, other: str = BASE) -> Interval:
    """Return the logarithm of the ratio of two arms' distances: by seed for networks of equal
    depth, whose initial weights are the same."""
    paired = (arm in PRICES) == (other in PRICES)
    return log_ratio(by_arm[arm].fid, by_arm[other].fid, paired=paired)


def in_percent(log: Interval) -> str:
    """Return a ratio and the ends of its interval: "1.02 (0.90 to 1.15)", and a verdict."""
    if math.isinf(log.half):
        return f"{math.exp(log.mean):.2f}, one seed"
    low, high = math.exp(log.low), math.exp(log.high)
    text = f"{math.exp(log.mean):.2f} ({low:.2f} to {high:.2f})"
    word = {"ahead": "better", "behind": "worse", "not settled": "level"}[log.verdict("lower")]
    return f"{text}, {word}"


def filled(text: str) -> str:
    """Return the page with its tables made from the records."""
    for file in HERE.glob("*.csv"):
        pattern = rf"(<!-- {file.stem} -->\n)(?:.*?\n)?(<!-- end -->)"
        if re.search(pattern, text, re.DOTALL):
            make = rates if file.stem == "rates" else table
            rows = make(pd.read_csv(file)) + "\n"
            text = re.sub(pattern, lambda m, rows=rows: m[1] + rows + m[2], text, flags=re.DOTALL)
    return text


def main() -> None:
    if len(sys.argv) == 3:
        collect(Path(sys.argv[1])).to_csv(HERE / f"{sys.argv[2]}.csv", index=False)
    page = HERE / "README.md"
    page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
