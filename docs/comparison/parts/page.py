"""Fill in the table of methods, from runs.csv and times.csv beside this file.

python docs/comparison/parts/page.py                               # from these files alone
python docs/comparison/parts/page.py comparisons/*/runs            # add the runs of these folders
python docs/comparison/parts/page.py --times                       # measure times of steps again

A run belongs to a method if its settings are those that the method's overrides give.
"""

import functools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from tread_zoo.cli import compose_settings
from tread_zoo.comparison.intervals import interval
from tread_zoo.config import flatten, make_config
from tread_zoo.evaluation.flops import mean_flops
from tread_zoo.training.loop import step_flops
from tread_zoo.training.setup import build_setup

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
METRICS = ["fid", "label_accuracy", "recall", "held_out_loss"]
COMPARED = (
    "backbone", "routing", "objective", "alignment", "sampler", "guidance", "optimizer", "data",
)  # fmt: skip
SAME_FLOPS = 0.02


@dataclass(frozen=True)
class Method:
    """A row of the table: overrides of a run with it, and of one without, on top of `base`."""

    name: str
    base: str
    method: str
    default: str = ""

    @property
    def arms(self) -> tuple[str, str]:
        """Overrides of both."""
        return f"{self.base} {self.method}", f"{self.base} {self.default}".strip()


FLOW = "sampler=euler sampler.num_steps=25 guidance=cfg guidance.scale=2"
MEAN = "objective=mean_flow objective.equal_fraction=0.5 objective.guidance_scale=2 sampler=mean"
WINDOWS = "backbone.pattern=[{name:attention,window:2,repeat:3},{name:attention}]"
CONTEXTS = (
    "data=image_folder data.path=digits_contexts data.channels=1 data.context=context.npy"
    " training.num_steps=800"
)
SHORT = "backbone.short_conv=true"
METHODS = [
    *(
        Method(f"MeanFlow, steps: {n}", f"backbone={row} backbone.time_scale=10",
               f"{MEAN} sampler.num_steps={n}", FLOW)
        for row in ("dit_tiny", "mamba_tiny") for n in (1, 4)
    ),
    *(
        Method(name, f"backbone={row}", overrides)
        for row in ("dit_tiny", "gla_tiny")
        for name, overrides in (
            ("two noise levels", "objective.second_level=0.25"),
            ("self_flow", "alignment=self_flow"),
            ("both", "objective.second_level=0.25 alignment=self_flow"),
        )
    ),
    *(
        Method(f"linear_dit, less {other}", f"routing={routing}", "backbone=linear_dit_tiny",
               f"backbone={other}_tiny")
        for other in ("lightning_dit", "gla") for routing in ("none", "tread")
    ),
    Method("windows, less lightning_dit", "routing=none", f"backbone=hybrid_tiny {WINDOWS}",
           "backbone=lightning_dit_tiny"),
    Method("windows, less no windows", "backbone=hybrid_tiny", WINDOWS,
           "backbone.pattern=attention:1"),
    *(
        Method("registers", f"backbone={row}", "backbone.num_registers=4")
        for row in ("dit_tiny", "gated_deltanet_tiny", "mamba_tiny routing.start=3 routing.end=10")
    ),
    *(
        Method("short convolutions", f"backbone={row}", SHORT)
        for row in ("gla_tiny", "gated_deltanet_tiny", "kda_tiny")
    ),
    Method("a decay per channel", "backbone=gated_deltanet_tiny", "backbone.per_channel=true"),
    Method("KDA, less gated_deltanet", "", "backbone=kda_tiny", "backbone=gated_deltanet_tiny"),
    Method("label as tokens, too", "backbone=lightning_dit_tiny", "backbone.num_class_tokens=4"),
    Method("cross-attention", f"backbone=dit_tiny {CONTEXTS}",
           "backbone.context_as=cross_attention"),
    Method("published start", "backbone=rwkv7_tiny", "backbone.published_init=true"),
    Method("bypassed=zero, less dense", "backbone=dit_tiny routing.rejoin=project",
           "routing.bypassed=zero"),
]  # fmt: skip


def settings_of(overrides: str) -> dict[str, str]:
    """Return what tells the methods of runs with these overrides apart."""
    return compared(make_config(**compose_settings("train", overrides.split())).as_dict())


def compared(config: dict) -> dict[str, str]:
    """Return the settings that tell methods apart."""
    return {k: repr(v) for k, v in flatten(config).items() if k.startswith(COMPARED)}


def collect(folders: Iterable[Path]) -> None:
    """Add the scored runs of the folders to runs.csv; a run that is there already is replaced."""
    wanted = {arm: settings_of(arm) for arm in sorted({a for m in METHODS for a in m.arms})}
    defaults, rows = {}, []
    for run in sorted(run for folder in folders for run in folder.iterdir()):
        if not (run / "score.json").exists():
            continue
        config = json.loads((run / "config.json").read_text())
        values = json.loads((run / "score.json").read_text())["values"]
        row = config["backbone"]["name"]
        if row not in defaults:  # older runs lack options that are newer
            defaults[row] = settings_of(f"backbone={row}")
        own = {**defaults[row], **compared(config)}
        for arm, given in wanted.items():
            if all(own.get(key) == value for key, value in given.items()):
                of = (arm, config["training"]["num_steps"], config["seed"], run.parts[-3])
                rows.append((*of, flops_of(arm), *(values.get(metric) for metric in METRICS)))
    keys = ["arm", "steps", "seed", "study"]
    _merge(HERE / "runs.csv", pd.DataFrame(rows, columns=[*keys, "flops", *METRICS]), keys)


@functools.cache
def flops_of(overrides: str) -> float:
    """Return the FLOPs of a training step for an image."""
    setup = build_setup(make_config(**compose_settings("train", overrides.split())))
    return mean_flops(step_flops(setup, setup.backbone))


def measure(rounds: int = 10) -> None:
    """Write the time of a step, over that of the method's default, to times.csv."""
    for base in dict.fromkeys(method.base for method in METHODS):
        methods = [method for method in METHODS if method.base == base]
        options = dict.fromkeys(o for m in methods for o in (m.default, m.method) if o)
        command = [sys.executable, "benchmarks/methods.py", "--rounds", str(rounds)]
        command += ["--base", f"training.precision=fp32 {base}", *options]
        done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        times = {"": 1.0}
        for line in done.stdout.splitlines():
            if (name := re.split(r"  +", line)[0]) in options:
                times[name] = float(line.split()[-2])
        rows = [(*m.arms, times[m.method] / times[m.default]) for m in methods]
        names = ["arm", "default", "time"]
        _merge(HERE / "times.csv", pd.DataFrame(rows, columns=names), names[:2])


def _merge(file: Path, rows: pd.DataFrame, keys: list[str]) -> None:
    """Write rows to a table; those of the same keys are replaced."""
    before = [pd.read_csv(file)] if file.exists() else []
    table = pd.concat([*before, rows]).drop_duplicates(keys, keep="last")
    table.sort_values(keys).to_csv(file, index=False, float_format="%.6g")


def table() -> str:
    """Return a row for each method that has runs."""
    runs = pd.read_csv(HERE / "runs.csv")
    times = pd.read_csv(HERE / "times.csv").set_index(["arm", "default"]).time.to_dict()
    flops = runs.groupby("arm").flops.last()
    lines = [
        "| | network | n | Fréchet distance | label accuracy | less the default, equal steps "
        "| equal FLOPs | FLOPs of a step | time of a step |",
        "|---" * 9 + "|",
    ]
    for method in METHODS:
        arm, default = method.arms
        own, other = runs[runs.arm == arm], runs[runs.arm == default]
        if own.empty:
            continue
        steps, by_seed = own.steps.iloc[0], own.groupby("seed").mean(numeric_only=True)
        cost = flops[arm] / flops.get(default, math.nan)
        differences = ["", ""]
        for i, ratio in enumerate((1, cost)):
            near = other[(other.steps / (steps * ratio) - 1).abs() < SAME_FLOPS]
            if set(own.study) & set(near.study):
                near = near[near.study.isin(own.study)]
            apart = (by_seed.fid - near.groupby("seed").fid.mean()).dropna()
            differences[i] = interval(apart).judged("lower") if len(apart) else ""
        network = re.search(r"backbone=(\w+?)_tiny", arm)[1]
        routed = "" if "routing=none" in arm else ", routed"
        shown = (("fid", 2), ("label_accuracy", 3))
        scores = [
            "" if by_seed[m].isna().all() else interval(by_seed[m]).plus_minus(n, signed=False)
            for m, n in shown
        ]
        cells = [method.name, f"`{network}`{routed}", str(len(by_seed)), *scores, *differences]
        cells += ["" if math.isnan(cost) else f"{cost:.2f}"]
        cells += [f"{times[method.arms]:.2f}" if method.arms in times else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the page with its table."""
    pattern = r"(<!-- methods -->\n).*?(<!-- end -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    if "--times" in sys.argv:
        measure()
    elif len(sys.argv) > 1:
        collect(map(Path, sys.argv[1:]))
    page = HERE / "README.md"
    page.write_text(filled(page.read_text()))
