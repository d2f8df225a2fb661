"""The tables and the figure of networks at equal training FLOPs, from .csv files of scores.

python docs/comparison/tables.py equal_cost RUNS STUDY    # adds a folder of runs to STUDY.csv
"""

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from scipy import stats
from tables import corrected, markdown, p_value

from tread_zoo.comparison.intervals import Interval, Ratio, log_ratio

HERE = Path(__file__).parent
PAGES = (HERE / "README.md", HERE.parents[1] / "results.md", HERE.parents[2] / "README.md")
BASE = "dense 12"
PRICES = {"dense 9": 0.75, "dense 6": 0.5}  # of a sample, over that of 12 blocks
ARMS = {
    "dense 6": "dense, 6 blocks", "dense 9": "dense, 9 blocks", BASE: "dense, 12 blocks",
    "routed 12": "routed, 12 blocks", "layer dropout 12": "layer dropout, 12 blocks",
}  # fmt: skip
STUDIES = {"digits": "digits, 16 tokens", "fashion_mnist": "Fashion-MNIST, 64 tokens"}
FEW = ("few_images", "2000_images_fashion_mnist", "300_images_fashion_mnist")
LONGER = "longer"
ENDPOINTS = {BASE: "12 dense blocks", "layer dropout 12": "layer dropout"}  # of few images
METRICS = ["fid", "kid", "precision", "recall", "label_accuracy"]


def add(runs: str, study: str, note: str = "") -> None:
    """Add a row for each score in a folder of runs to a study's .csv file, in place of a row of the
    same keys. `note` is added to the names of the arms."""
    rows = [row_of(file) for file in sorted(Path(runs).glob("*/score*.json"))]
    for row in rows:
        row["arm"] += note
    file = HERE / f"{study}.csv"
    keys = ["arm", "seed", "learning_rate", "steps", "draw", "guidance"]
    old = [pd.read_csv(file)] if file.exists() else []
    table = pd.concat([*old, pd.DataFrame(rows)]).drop_duplicates(keys, keep="last")
    table.to_csv(file, index=False, float_format="%.6g")


def row_of(score: Path) -> dict[str, Any]:
    """Return the row of a score that was made on this machine."""
    record, config = (json.loads(f.read_text()) for f in (score, score.with_name("config.json")))
    start = json.loads(score.with_name("commands.jsonl").read_text().splitlines()[0])
    protocol, values = record["protocol"], record["values"]
    (cpu,) = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)[:1]
    return {
        "arm": arm_of(config), "seed": config["seed"],
        "learning_rate": config["optimizer"]["learning_rate"],
        "steps": protocol["step"], "draw": protocol["seed"],
        "guidance": protocol["sampling"]["guidance_scale"],
        **{metric: values[metric] for metric in METRICS},
        "held_out_loss": values.get("held_out_loss"),
        "range_worth": record.get("contributions", {}).get("loss_rises", [None])[-1],
        "code": start["code"].split()[-1][:7],
        "machine": f"{cpu}, {record.get('run', {}).get('device', '')}".rstrip(", "),
    }  # fmt: skip


def arm_of(config: dict[str, Any]) -> str:
    """Return the arm that a run's settings make."""
    names = {"none": "dense", "layer_drop": "layer dropout"}
    return f"{names.get(config['routing']['name'], 'routed')} {config['backbone']['depth']}"


def tables() -> dict[str, str]:
    """Return all tables."""
    own = {study: table(means_by_arm(study)) for study in STUDIES}
    learning = rates(pd.read_csv(HERE / "rates.csv"))
    return {"answer": answer(), "rates": learning, **own, **few_images(), **longer()}


def means_by_arm(study: str, where: str = "guidance == 1") -> dict[str, pd.DataFrame]:
    """Return each arm's unguided scores by seed, means over draws of samples. `where` chooses other
    scores; it may name `budget`, the steps over the arm's fewest."""
    runs = pd.read_csv(HERE / f"{study}.csv")
    runs["budget"] = runs.steps / runs.groupby("arm").steps.transform("min")
    plain = runs.query(where)
    return {arm: of.groupby("seed")[METRICS].mean() for arm, of in plain.groupby("arm")}


def table(by_arm: dict[str, pd.DataFrame]) -> str:
    """Return the table of a study: each arm's mean over seeds, and its distance over that of dense
    networks of 12 blocks."""
    rows = []
    for arm, means in sorted(by_arm.items(), key=lambda each: each[1].fid.mean()):
        over = "1" if arm == BASE else in_brackets(ratio(by_arm, arm)) + dissent(by_arm, arm)
        others = [f"{means[metric].mean():.3f}" for metric in ("kid", "label_accuracy")]
        cells = [f"{arm} blocks", len(means), middle(means.fid), over, *others]
        rows.append([*cells, PRICES.get(arm, 1)])
    return markdown(
        "| equal FLOPs of training | seeds | Fréchet distance | over that of 12 dense blocks "
        "| kernel distance | label accuracy | price of a sample |",
        rows,
    )


def answer() -> str:
    """Return the table of all studies: each arm's distance, and what it is over that of 12 dense
    blocks."""
    studies = [means_by_arm(study) for study in STUDIES]

    def cell(by_arm: dict[str, pd.DataFrame], arm: str) -> str:
        if arm not in by_arm:
            return ""
        text = f"{middle(by_arm[arm].fid)}, n = {len(by_arm[arm])}"
        over = in_words(ratio(by_arm, arm)) + dissent(by_arm, arm)
        return text if arm == BASE else f"{text}: {over}"

    return markdown(
        f"| equal FLOPs of training | {' | '.join(STUDIES.values())} | price of a sample |",
        (
            [name, *(cell(of, arm) for of in studies), PRICES.get(arm, 1)]
            for arm, name in ARMS.items()
        ),
    )


def few_images() -> dict[str, str]:
    """Return the tables of networks trained on few images: for each study their scores, and the
    endpoints, with Holm's correction."""
    head = "| network | steps | seeds | Fréchet distance | over that of 12 dense blocks | recall "
    head += "| held-out loss | nearer to a training image |"
    made = {}
    for study in FEW:
        runs, by_arm, rows = pd.read_csv(HERE / f"{study}.csv"), means_by_arm(study), []
        for arm, own in sorted(by_arm.items(), key=lambda each: middle(each[1].fid)):
            every = runs[runs.arm == arm].mean(numeric_only=True)
            over = "1" if arm == BASE else in_brackets(ratio(by_arm, arm)) + dissent(by_arm, arm)
            name = re.sub(r"(\d+)", r"\1 blocks", arm, count=1)
            cells = [name, int(every.steps), len(own), middle(own.fid), over]
            cells += [f"{every.recall:.2f}", f"{every.held_out_loss:.3f}"]
            near = every.get("nearer_to_training", math.nan)
            rows.append([*cells, "" if math.isnan(near) else f"{100 * near:.0f} %"])
        made[study] = markdown(head, rows)

        fid = by_arm["routed 12"].fid
        logs = [log_ratio(fid, by_arm[arm].fid, paired=True) for arm in ENDPOINTS]
        made[f"{study}_endpoints"] = endpoints(ENDPOINTS.values(), logs, map(p_value, logs))
    return made


def endpoints(others: Iterable[str], logs: Iterable[Interval], p_values: Iterable[float]) -> str:
    """Return the table of log ratios of routed to other networks, with Holm's correction."""
    found = zip(others, logs, corrected(p_values), strict=True)
    return markdown(
        "| endpoint | ratio of distances | p, corrected |",
        ([f"routed over {name}", in_brackets(log), f"{p:.2g}"] for name, log, p in found),
    )


def longer() -> dict[str, str]:
    """Return the tables of longer training: each arm's distances after one, two and four budgets,
    and the endpoints at four, with Holm's correction."""
    plain, guided = "guidance == 1 and budget == {}", "guidance != 1 and budget == 4"
    by_budget = [means_by_arm(LONGER, plain.format(budget)) for budget in (1, 2, 4)]
    last, by_guidance, rows = by_budget[-1], means_by_arm(LONGER, guided), []
    for arm, own in by_budget[0].items():
        name = re.sub(r"(\d+)", r"\1 blocks", arm, count=1)
        cells = [middle(at[arm].fid) for at in (*by_budget, by_guidance)]
        over = "1" if arm == BASE else in_brackets(ratio(last, arm)) + dissent(last, arm)
        rows.append([name, len(own), *cells, over, f"{last[arm].label_accuracy.mean():.3f}"])
    head = "| network | seeds | distance after 1 budget | 2 budgets | 4 budgets | 4, guided by 1.5 "
    head += "| over that of 12 dense blocks, 4 budgets | label accuracy |"

    routed, shallow = last["routed 12"].fid, last["dense 6"].fid
    logs = [ratio(last, "routed 12"), log_ratio(routed, shallow, paired=False)]
    welch = stats.ttest_ind(np.log(routed), np.log(shallow), equal_var=False)
    ends = endpoints(["12 dense blocks", "6 dense blocks"], logs, [p_value(logs[0]), welch.pvalue])
    return {LONGER: markdown(head, rows), "longer_endpoints": ends}


def rates(scores: pd.DataFrame) -> str:
    """Return the table of learning rates: each arm's scores, of one seed and two draws."""
    rows = []
    for (arm, rate), own in scores.groupby(["arm", "learning_rate"]):
        plain, guided = (own[own.guidance == scale].mean(numeric_only=True) for scale in (1, 1.5))
        cells = [f"{arm} blocks", f"{rate:g}", f"{plain.fid:.2f}", f"{plain.kid:.2f}"]
        cells += [f"{plain.label_accuracy:.3f}", f"{plain.held_out_loss:.3f}", f"{guided.fid:.2f}"]
        rows.append(cells)
    return markdown(
        "| equal FLOPs of training | learning rate | Fréchet distance | kernel distance "
        "| label accuracy | held-out loss | Fréchet distance, guided by 1.5 |",
        rows,
    )


def middle(values: pd.Series) -> str:
    """Return the geometric mean."""
    return f"{math.exp(values.map(math.log).mean()):.2f}"


def ratio(by_arm: dict[str, pd.DataFrame], arm: str, metric: str = "fid") -> Interval:
    """Return the logarithm of an arm's distance over that of 12 dense blocks: by seed for networks
    of equal depth, whose initial weights are the same."""
    return log_ratio(by_arm[arm][metric], by_arm[BASE][metric], paired=arm not in PRICES)


def word(log: Interval) -> str:
    """Return the verdict on a ratio: `level` if an interval around 1 excludes a difference of a
    quarter, either way."""
    words = {"ahead": "better", "behind": "worse"}
    if (verdict := log.verdict("lower")) in words:
        return words[verdict]
    return "level" if max(-log.low, log.high) < math.log(1.25) else verdict


def in_words(log: Interval) -> str:
    """Return a ratio's verdict, and how much of the other's distance that is."""
    if log.n < 2:
        return "one seed"
    said = word(log)
    middle, low, high = (100 * (math.exp(x) - 1) for x in (log.mean, log.low, log.high))
    if said in ("level", "not settled"):
        return f"{said} ({low:+.0f} to {high:+.0f} %)"
    near, far = sorted((abs(low), abs(high)))
    return f"**{said}** by {abs(middle):.0f} % ({near:.0f} to {far:.0f})"


def in_brackets(log: Interval) -> str:
    """Return a ratio, the ends of its interval, and a verdict: "1.02 (0.90 to 1.15), level"."""
    return f"{Ratio(log).in_brackets()}, {'one seed' if log.n < 2 else word(log)}"


def dissent(by_arm: dict[str, pd.DataFrame], arm: str) -> str:
    """Return the kernel distance's verdict on an arm if it is another one, else "". There is none
    if the distance of a seed is negative, which it can be for samples like real images."""
    if any((by_arm[each].kid <= 0).any() for each in (arm, BASE)):
        return ""
    fid, kid = (ratio(by_arm, arm, metric) for metric in ("fid", "kid"))
    if kid.n < 2 or kid.verdict("lower") == fid.verdict("lower"):
        return ""
    return f"; by the kernel distance {word(kid)}"


def draw() -> None:
    """Draw each arm's ratio to 12 dense blocks, with its interval, a colour for each study."""
    with plt.rc_context({"svg.hashsalt": "tread_zoo", "svg.fonttype": "none"}):
        figure, axis = plt.subplots(figsize=(6.4, 2.6), layout="constrained")
        arms = [arm for arm in ARMS if arm != BASE][::-1]
        for shift, (study, title) in enumerate(STUDIES.items()):
            by_arm = means_by_arm(study)
            logs = {arm: ratio(by_arm, arm) for arm in arms if arm in by_arm}
            logs = {arm: log for arm, log in logs.items() if log.n > 1}
            middle, low, high = np.exp([(x.mean, x.low, x.high) for x in logs.values()]).T
            ends = (middle - low, high - middle)
            heights = [arms.index(arm) - 0.12 + 0.24 * (1 - shift) for arm in logs]
            axis.errorbar(middle, heights, xerr=ends, fmt="o", capsize=3, label=title)
        axis.axvline(1, color="grey", linewidth=1)
        axis.set_xscale("log")
        axis.margins(0.15)
        axis.set_xticks([0.5, 0.6, 0.8, 1, 1.2, 1.5], ["0.5", "0.6", "0.8", "1", "1.2", "1.5"])
        axis.minorticks_off()
        axis.set_yticks(range(len(arms)), [ARMS[arm] for arm in arms])
        axis.set_xlabel("distance over that of 12 dense blocks; left is better")
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
        figure.savefig(HERE / "ratios.svg", metadata={"Date": None})
        plt.close(figure)
