"""Fill in the tables of dense, routed and shallower networks, of long skips and of what wakes the
routed blocks, from evidence.csv.

python docs/comparison/digits/evidence.py                                 # from that file alone
python docs/comparison/digits/evidence.py comparisons/waking_digits/runs  # a study's runs first
"""

import json
import re
import sys
from pathlib import Path

import pandas as pd

from tread_zoo.comparison.findings import direction
from tread_zoo.comparison.intervals import interval
from tread_zoo.evaluation.contribution import data_contributions
from tread_zoo.runs.restore import restore

HERE = Path(__file__).parent
STUDY = "evidence_digits"
DIGITS = {"fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3, "held_out_loss": 3}
METRICS = list(DIGITS)
ARMS = {  # of `dit`
    "backbone-dit_tiny_routing-none": "dense, 12 blocks",
    "backbone-dit_tiny_routing-tread": "routed, 12 blocks",
    "backbone-dit_tiny_backbone.depth-6_routing-none": "dense, 6 blocks",
}

# Options of waking_digits that have another name today, or None.
TODAY = {
    "redraw=True": "random_ltd", "rejoin=mask": "maskdit, loss of all tokens",
    "rejoin=project": "sprint absent=dense",
    "rejoin=project path_drop_probability=0.1": "sprint absent=dense path_drop=0.1",
    "reconstruction_weight=0.0": "microdit", "reconstruction_weight=0.5": None,
    "rate_range=[0.0,0.75]": None, "detach=True": None, "sparsify=False": None,
}  # fmt: skip


def collect(runs: Path) -> None:
    """Write the runs of a study to evidence.csv in place of their rows there; the others stay."""
    study = runs.parent.name
    rows = []
    for run in sorted(runs.iterdir()):
        if (run / "score.json").exists():
            config = json.loads((run / "config.json").read_text())
            values = json.loads((run / "score.json").read_text())["values"]
            row = {
                "study": study,
                "run": re.sub(r"_seed-\d+(-[0-9a-f]{8})?$", "", run.name),
                "seed": config["seed"],
            }
            rows.append({**row, **{m: values[m] for m in METRICS}, "routed_blocks": worth(run)})
    file = HERE / "evidence.csv"
    table = pd.concat([pd.DataFrame(rows), pd.read_csv(file)])
    table.drop_duplicates(["study", "run", "seed"]).to_csv(file, index=False, float_format="%.6g")


def worth(run: Path) -> float | None:
    """Return the relative change of the output without the blocks of its route, of a dense network
    and in the study of waking without blocks 2 … -4, which were the default of every row; None for
    a shallower network."""
    if "backbone.depth" in run.name:
        return None
    network = restore(str(run), weights="ema", device="cpu", precision="fp32")
    given = network.config["routing"]["start"], network.config["routing"]["end"]
    waking = run.parts[-3] == "waking_digits"
    start, end = (2, -4) if "auto" in given or waking else given
    ranges = [(start, end % network.backbone.num_blocks)]
    record = data_contributions(
        network.backbone, network.objective, network.data({}), ranges=ranges, precision="fp32"
    )
    return float(record["ranges"][0][2])


def table() -> str:
    """Return the table: mean and number of seeds of each kind of network, and 95 % intervals of the
    differences of equal seeds."""
    own = pd.read_csv(HERE / "evidence.csv").query("study == @STUDY")
    names = own.run.str.extract(r"backbone-(\w+?)_tiny_(backbone\.depth-\d+_)?routing-(\w+)")
    kind = names[2].where(names[1].isna(), "shallow").map(lambda k: {"none": "dense"}.get(k, k))
    own = own.assign(row=names[0], kind=kind)
    lines = [
        "| | seeds | dense | routed | shallower | routed - dense | routed - shallower "
        "| change without these blocks, dense | routed |",
        "|---" * 9 + "|",
    ]
    by = own.pivot_table(index=["row", "seed"], columns="kind", values=["fid", "routed_blocks"])
    for row, of in by.groupby(level="row"):
        fid, blocks = of["fid"], of["routed_blocks"]
        differences = [(fid["tread"] - fid[other]).dropna() for other in ("dense", "shallow")]
        cells = [f"{fid[k].mean():.2f}" for k in ("dense", "tread", "shallow")]
        cells += [interval(each).judged("lower") for each in differences]
        cells += [f"{100 * blocks[k].mean():.0f} %" for k in ("dense", "tread")]
        lines.append(f"| `{row}` | {min(map(len, differences))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_dit() -> str:
    """Return the table of `dit`: means over seeds, and differences of equal seeds, with 95 %
    intervals."""
    own = pd.read_csv(HERE / "evidence.csv").query("study == @STUDY and run in @ARMS")
    arms = {name: own[own.run == run].set_index("seed") for run, name in ARMS.items()}
    shown = {m: n for m, n in DIGITS.items() if m != "kid"}
    lines = [
        "| | seeds | Fréchet distance | precision | recall | label accuracy | held-out loss "
        "| change without blocks 2 … 7 |",
        "|---" * 8 + "|",
    ]
    for name, of in arms.items():
        cells = [interval(of[m]).plus_minus(n, signed=False) for m, n in shown.items()]
        worth = "" if "6" in name else f"{100 * of.routed_blocks.mean():.0f} %"
        lines.append(f"| {name} | {len(of)} | {' | '.join(cells)} | {worth} |")
    dense, routed, shallow = arms
    for one, other in ((routed, dense), (shallow, dense), (routed, shallow)):
        by = (arms[one][METRICS] - arms[other][METRICS]).dropna()
        cells = [interval(by[m]).judged(direction(m) or "lower", n) for m, n in shown.items()]
        lines.append(f"| {one} - {other} | {len(by)} | {' | '.join(cells)} | |")
    return "\n".join(lines)


def table_of_waking() -> str:
    """Return the table of other routes of `dit`, by distance: means, and 95 % intervals of the
    differences of equal seeds from the default route."""
    records = pd.read_csv(HERE / "evidence.csv")
    default = records[records.run == "backbone-dit_tiny_routing-tread"].set_index("seed").fid
    lines = [
        "| | seeds | Fréchet distance | less the default route | change without blocks 2 … 7 |",
        "|---" * 5 + "|",
    ]
    rows = records.query("study == 'waking_digits'").groupby("run")
    for run, of in sorted(rows, key=lambda pair: pair[1].fid.mean()):
        options = run.removeprefix("routing.").split("_routing.")
        options = [re.sub("-_(.*)_(.*)_$", r"=[\1,\2]", option) for option in options]
        name = " ".join(option.replace("-", "=", 1) for option in options)
        if (name := TODAY.get(name, name)) is None:
            continue
        by, worth = (of.set_index("seed").fid - default).dropna(), 100 * of.routed_blocks.mean()
        apart = interval(by).judged("lower")
        lines.append(f"| `{name}` | {len(by)} | {of.fid.mean():.2f} | {apart} | {worth:.0f} % |")
    return "\n".join(lines)


def table_of_skips() -> str:
    """Return the table of both routes: means, and 95 % intervals of the differences of equal seeds,
    of each row and of all."""
    own = pd.read_csv(HERE / "evidence.csv")
    own["row"] = own.run.str.extract(r"backbone-(\w+?)_tiny_")
    cut = own[own.run.str.fullmatch(r"backbone-\w+_tiny_routing-tread")].query("study == @STUDY")
    both = own.query("study == 'long_skips'").merge(cut, on=["row", "seed"], suffixes=("", "_cut"))
    lines = ["| | seeds | [2, 9) | [3, 10) | difference | of the held-out loss |", "|---" * 6 + "|"]
    for row, of in [*both.groupby("row"), ("all four", both)]:
        differences = (
            interval(of[m] - of[f"{m}_cut"]).judged("lower", d)
            for m, d in (("fid", 2), ("held_out_loss", 4))
        )
        name = row if row == "all four" else f"`{row}`"
        means = f"{of.fid_cut.mean():.2f} | {of.fid.mean():.2f}"
        lines.append(f"| {name} | {len(of)} | {means} | {' | '.join(differences)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the page with its tables."""
    made = {
        "dit": table_of_dit(), "evidence": table(), "skips": table_of_skips(),
        "waking": table_of_waking(),
    }  # fmt: skip
    for name, content in made.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(pattern, lambda m, c=content: f"{m[1]}{c}\n{m[2]}", text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        collect(Path(folder))
    page = HERE / "README.md"
    page.write_text(filled(page.read_text()))
