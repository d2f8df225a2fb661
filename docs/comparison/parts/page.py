"""The table of methods, from runs.csv and times.csv, which names the methods and their overrides.

python docs/comparison/tables.py parts comparisons/*/runs   # adds the runs of these folders
python docs/comparison/tables.py parts --times              # measures the times of steps again

A run belongs to a method if its settings are those that the method's overrides give.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tables import DIGITS, add_rows, markdown, scores

from tread_zoo.cli import compose_settings
from tread_zoo.comparison.intervals import interval
from tread_zoo.config import flatten, make_config

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
METRICS = ["fid", "label_accuracy", "recall", "held_out_loss"]
COMPARED = (
    "backbone", "routing", "objective", "alignment", "sampler", "guidance", "optimizer", "data",
)  # fmt: skip
SAME_FLOPS = 0.02


def read_methods() -> pd.DataFrame:
    """Return times.csv; `arm` and `other` are all overrides of a run with a method and of one
    without."""
    methods = pd.read_csv(HERE / "times.csv", keep_default_na=False)
    arms = {"arm": methods.method, "other": methods.default}
    return methods.assign(**{k: (methods.base + " " + own).str.strip() for k, own in arms.items()})


def add(*folders: str) -> None:
    """Add the runs of the folders, or measure times anew."""
    if folders == ("--times",):
        measure()
        return
    methods, rows = read_methods(), []
    arms = {
        arm: compared(make_config(**compose_settings("train", arm.split())).as_dict())
        for arm in sorted({*methods.arm, *methods.other})
    }
    for run, config, record in (score for folder in folders for score in scores(folder)):
        own, facts = compared(config), json.loads((run / "facts.json").read_text())
        rows += [
            {"arm": arm, "steps": config["training"]["num_steps"], "seed": config["seed"],
             "study": run.parts[-3], "flops": facts["flops_routed"],
             **{metric: record["values"].get(metric) for metric in METRICS}}
            for arm, given in arms.items() if given.items() <= own.items()
        ]  # fmt: skip
    add_rows(rows, HERE / "runs.csv", ["arm", "steps", "seed", "study"])


def compared(config: dict) -> dict[str, str]:
    """Return the settings that tell methods apart."""
    return {k: repr(v) for k, v in flatten(config).items() if k.startswith(COMPARED)}


def measure() -> None:
    """Write the time of a step, over that of the method's default, to times.csv."""
    methods = read_methods().drop(columns=["arm", "other"])
    for base, own in methods.groupby("base", sort=False):
        names = [name for name in dict.fromkeys([*own.default, *own.method]) if name]
        command = [sys.executable, "benchmarks/methods.py", "--rounds", "10"]
        command += ["--base", f"training.precision=fp32 {base}", *names]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        times = {"": 1.0}
        for line in done.stdout.splitlines():
            if (name := re.split(r"  +", line)[0]) in names:
                times[name] = float(line.split()[-2])
        pairs = zip(own.method, own.default, strict=True)
        methods.loc[own.index, "time"] = [times[one] / times[other] for one, other in pairs]
    methods.to_csv(HERE / "times.csv", index=False, float_format="%.6g")


def tables() -> dict[str, str]:
    """Return the table: a row for each method that has runs."""
    runs = pd.read_csv(HERE / "runs.csv")
    rows = [row_of(m, runs) for m in read_methods().itertuples()]
    return {
        "methods": markdown(
            "| | network | n | Fréchet distance | label accuracy | less the default, equal steps "
            "| equal FLOPs | FLOPs of a step | time of a step |",
            filter(None, rows),
        )
    }


def row_of(method: tuple, runs: pd.DataFrame) -> list[object]:
    """Return the cells of a method; none without runs."""
    own, other = runs[runs.arm == method.arm], runs[runs.arm == method.other]
    if own.empty:
        return []
    steps, by_seed = own.steps.iloc[0], own.groupby("seed").mean(numeric_only=True)
    cost = own.flops.iloc[-1] / other.flops.iloc[-1] if len(other) else math.nan
    apart = []
    for ratio in (1, cost):
        near = other[(other.steps / (steps * ratio) - 1).abs() < SAME_FLOPS]
        if set(own.study) & set(near.study):
            near = near[near.study.isin(own.study)]
        by = (by_seed.fid - near.groupby("seed").fid.mean()).dropna()
        apart.append(interval(by).with_verdict("lower") if len(by) else "")
    network = re.search(r"backbone=(\w+?)_tiny", method.arm)[1]
    routed = "" if "routing=none" in method.arm else ", routed"
    values = [
        "" if by_seed[m].isna().all() else interval(by_seed[m]).plus_minus(DIGITS[m], signed=False)
        for m in ("fid", "label_accuracy")
    ]
    costs = ["" if math.isnan(each) else f"{each:.2f}" for each in (cost, method.time)]
    return [method.name, f"`{network}`{routed}", len(by_seed), *values, *apart, *costs]
