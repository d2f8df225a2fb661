"""The tables of dense, routed and shallower networks, of long skips and of what wakes the routed
blocks, from evidence.csv.

python docs/comparison/tables.py digits comparisons/{evidence_digits,long_skips,waking_digits}/runs
"""

import re
from pathlib import Path

import pandas as pd
from tables import DIGITS, add_rows, markdown, percent, scores, with_verdict

from tread_zoo.comparison.intervals import interval

HERE = Path(__file__).parent
ARMS = {  # of `dit`
    "dense, 12 blocks": "backbone-dit_tiny_routing-none",
    "routed, 12 blocks": "backbone-dit_tiny_routing-tread",
    "dense, 6 blocks": "backbone-dit_tiny_backbone.depth-6_routing-none",
}
SHOWN = [metric for metric in DIGITS if metric != "kid"]

# Options of waking_digits that have another name today, or None.
TODAY = {
    "redraw=True": "random_ltd", "rejoin=mask": "maskdit, loss of all tokens",
    "rejoin=project": "sprint absent=dense",
    "rejoin=project path_drop_probability=0.1": "sprint absent=dense path_drop=0.1",
    "reconstruction_weight=0.0": "microdit", "reconstruction_weight=0.5": None,
    "rate_range=[0.0,0.75]": None, "detach=True": None, "sparsify=False": None,
}  # fmt: skip


def add(*folders: str) -> None:
    """Add the runs of studies. `routed_blocks` is the change of the output without the blocks of
    the route; of a dense network without those of the default route."""
    rows = []
    for run, config, record in (score for folder in folders for score in scores(folder)):
        name = re.sub(r"_seed-\d+(-[0-9a-f]{8})?$", "", run.name)
        worth = record["contributions"]["ranges"] if "backbone.depth" not in name else []
        rows.append({
            "study": run.parts[-3], "run": name, "seed": config["seed"],
            **{metric: record["values"][metric] for metric in DIGITS},
            "routed_blocks": worth[0][2] if worth else None,
        })  # fmt: skip
    add_rows(rows, HERE / "evidence.csv", ["study", "run", "seed"])


def tables() -> dict[str, str]:
    """Return the tables. Differences are of equal seeds."""
    table = pd.read_csv(HERE / "evidence.csv")
    own = table[table.study == "evidence_digits"]
    return {"dit": of_dit(own), "evidence": of_all(own), "skips": of_skips(table, own)} | {
        "waking": of_waking(table[table.study == "waking_digits"], own)
    }


def of_all(own: pd.DataFrame) -> str:
    """Return the table of each backbone: dense, routed and shallower."""
    names = own.run.str.extract(r"backbone-(\w+?)_tiny_(backbone\.depth-\d+_)?routing-(\w+)")
    own = own.assign(row=names[0], kind=names[2].where(names[1].isna(), "shallow"))
    values = ["fid", "routed_blocks"]
    rows = []
    for row, of in own.pivot_table(values, ["row", "seed"], "kind").groupby(level="row"):
        fid, blocks = of["fid"], of["routed_blocks"]
        apart = [(fid["tread"] - fid[other]).dropna() for other in ("none", "shallow")]
        cells = [f"`{row}`", min(map(len, apart))]
        cells += [f"{fid[k].mean():.2f}" for k in ("none", "tread", "shallow")]
        cells += [interval(each).with_verdict("lower") for each in apart]
        rows.append([*cells, percent(blocks["none"]), percent(blocks["tread"])])
    return markdown(
        "| | seeds | dense | routed | shallower | routed - dense | routed - shallower "
        "| change without these blocks, dense | routed |",
        rows,
    )


def of_dit(own: pd.DataFrame) -> str:
    """Return the table of `dit`: means, and the differences of each two."""
    arms = {name: own[own.run == run].set_index("seed") for name, run in ARMS.items()}
    rows = []
    for name, of in arms.items():
        cells = [interval(of[m]).plus_minus(DIGITS[m], signed=False) for m in SHOWN]
        worth = "" if "6" in name else percent(of.routed_blocks)
        rows.append([name, len(of), *cells, worth])
    dense, routed, shallow = arms
    for one, other in ((routed, dense), (shallow, dense), (routed, shallow)):
        by = (arms[one][SHOWN] - arms[other][SHOWN]).dropna()
        rows.append([f"{one} - {other}", len(by), *with_verdict(by)])
    return markdown(
        "| | seeds | Fréchet distance | precision | recall | label accuracy | held-out loss "
        "| change without blocks 2 … 7 |",
        rows,
    )


def of_waking(waking: pd.DataFrame, own: pd.DataFrame) -> str:
    """Return the table of other routes of `dit`, by distance."""
    default = own[own.run == ARMS["routed, 12 blocks"]].set_index("seed").fid
    rows = []
    for run, of in sorted(waking.groupby("run"), key=lambda pair: pair[1].fid.mean()):
        options = run.removeprefix("routing.").split("_routing.")
        options = [re.sub("-_(.*)_(.*)_$", r"=[\1,\2]", option) for option in options]
        name = " ".join(option.replace("-", "=", 1) for option in options)
        if name := TODAY.get(name, name):
            by = (of.set_index("seed").fid - default).dropna()
            cells = [f"{of.fid.mean():.2f}", interval(by).with_verdict("lower")]
            rows.append([f"`{name}`", len(by), *cells, percent(of.routed_blocks)])
    return markdown(
        "| | seeds | Fréchet distance | less the default route | change without blocks 2 … 7 |",
        rows,
    )


def of_skips(table: pd.DataFrame, own: pd.DataFrame) -> str:
    """Return the table of both routes, of each backbone and of all."""
    cut = own[own.run.str.endswith("tiny_routing-tread")]
    both = table[(table.study == "long_skips") & table.run.str.contains("start-3")]
    cut, both = (
        of.assign(row=of.run.str.extract(r"backbone-(\w+?)_tiny_")[0]) for of in (cut, both)
    )
    both = both.merge(cut, on=["row", "seed"], suffixes=("", "_cut"))
    rows = []
    for row, of in [*both.groupby("row"), ("all four", both)]:
        apart = pd.DataFrame({m: of[m] - of[f"{m}_cut"] for m in ("fid", "held_out_loss")})
        name = row if row == "all four" else f"`{row}`"
        means = [f"{of[m].mean():.2f}" for m in ("fid_cut", "fid")]
        rows.append([name, len(of), *means, *with_verdict(apart, {"fid": 2, "held_out_loss": 4})])
    return markdown("| | seeds | [2, 9) | [3, 10) | difference | of the held-out loss |", rows)
