"""The table of dense, routed and shallower networks of eleven backbones, from evidence.csv."""

from pathlib import Path

import numpy as np
import pandas as pd
from tables import markdown

from tread_zoo.comparison.intervals import Ratio, interval

HERE = Path(__file__).parent
PAGES = (HERE / "README.md",)
RATIOS = [("routed", "dense"), ("routed", "shallower"), ("shallower", "dense")]


def tables() -> dict[str, str]:
    """Return the table. Ratios are geometric means over equal seeds; the last row has their mean
    over backbones, whose interval takes a backbone as one value."""
    runs = pd.read_csv(HERE / "evidence.csv").query("study == 'evidence_digits'")
    names = runs.run.str.extract(r"backbone-(\w+?)_tiny_(backbone\.depth-\d+_)?routing-(\w+)")
    kinds = names[2].map({"none": "dense", "tread": "routed"}).where(names[1].isna(), "shallower")
    runs = runs.assign(backbone=names[0], kind=kinds)
    rows, all_logs = [], []
    values = runs.pivot_table(["fid", "routed_blocks"], ["backbone", "seed"], "kind")
    for backbone, of in values.groupby(level="backbone"):
        logs = [float(np.log(of.fid[one] / of.fid[other]).mean()) for one, other in RATIOS]
        cells = [f"`{backbone}`", int(of.fid.count().min())]
        cells += [f"{of.fid[kind].mean():.2f}" for kind in ("dense", "routed", "shallower")]
        cells += [f"{np.exp(log):.2f}" for log in logs]
        changes = [f"{100 * of.routed_blocks[kind].mean():.0f} %" for kind in ("dense", "routed")]
        rows.append([*cells, *changes])
        all_logs.append(logs)
    pooled = [f"**{Ratio(interval(logs)).in_brackets()}**" for logs in zip(*all_logs, strict=True)]
    rows.append([f"all {len(rows)}", *[""] * 4, *pooled, "", ""])
    head = "| | seeds | dense | routed | shallower | routed / dense | routed / shallower "
    head += "| shallower / dense | change without these blocks, dense | routed |"
    return {"shallower": markdown(head, rows)}
