"""The table of docs/board.md, from runs.csv, which has a row per run.

python docs/comparison/tables.py board entry/results.csv 'muon' 'optimizer=muon'   # adds an entry

Arguments: the `results.csv` of a comparison by `compare.study=board`, the name of the entry, and
what it changed. Its commit is the one that is checked out.
"""

import subprocess
from datetime import date
from pathlib import Path

import pandas as pd
from tables import markdown

from tread_zoo.comparison.intervals import interval

HERE = Path(__file__).parent
RUNS, PAGES = HERE / "runs.csv", (HERE.parent / "board.md",)
BUDGET, SAMPLE, SEEDS = 27.3e12, 4.5e9, 5  # FLOPs of training, FLOPs of a sample, fewest seeds


def add(results: str, name: str, change: str) -> None:
    """Add the runs of a comparison. Raises ValueError if they do not keep the rules."""
    runs = pd.read_csv(results)
    for column, most in (("flops", 1.01 * BUDGET), ("flops_per_sample", SAMPLE)):
        if runs[column].max() > most:
            raise ValueError(f"{column} is {runs[column].max():.4g}; the most is {most:.4g}.")
    if runs.seed.nunique() < SEEDS:
        raise ValueError(f"{runs.seed.nunique()} seeds; an entry has {SEEDS} or more.")
    code = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    rows = runs[["seed", "fid", "kid", "flops_per_sample", "machine"]].assign(
        name=name, change=change, code=code, date=str(date.today())
    )
    both = pd.concat([pd.read_csv(RUNS).query("name != @name"), rows])
    both.to_csv(RUNS, index=False)


def tables() -> dict[str, str]:
    """Return the table: one line per entry, the lowest mean first."""
    head = "| entry | Fréchet distance | kernel distance | seeds | GFLOPs a sample "
    rows = []
    for name, runs in pd.read_csv(RUNS).groupby("name"):
        by_seed, first = runs.groupby("seed")[["fid", "kid"]].mean(), runs.iloc[0]
        of, price = interval(by_seed.fid.tolist()), runs.flops_per_sample.max() / 1e9
        cells = [name, f"{of.mean:.2f} ± {of.half:.2f}", f"{by_seed.kid.mean():.3f}", len(by_seed)]
        cells += [f"{price:.2g}", first.change, first.date, f"`{first.code}`"]
        rows.append((of.mean, cells))
    ordered = (cells for _, cells in sorted(rows))
    return {"board": markdown(f"{head}| what it changed | date | commit |", ordered)}
