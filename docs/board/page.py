"""Fill in the table of docs/board.md from runs.csv, a row a run.

python docs/board/page.py                                                # from the records
python docs/board/page.py entry/results.csv 'muon' 'optimizer=muon'      # add a comparison first

Arguments: the `results.csv` of a comparison by `compare.study=board`, the name of the entry, and
what it changed. Its commit is the one that is checked out.
"""

import re
import subprocess
import sys
from datetime import date
from pathlib import Path

import pandas as pd

from tread_zoo.comparison.intervals import interval

HERE = Path(__file__).parent
RUNS, PAGE = HERE / "runs.csv", HERE.parent / "board.md"
PAGES = (PAGE,)
BUDGET, SAMPLE, SEEDS = 27.3e12, 4.5e9, 5  # FLOPs of training, FLOPs of a sample, fewest seeds


def add(results: Path, name: str, change: str) -> None:
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


def table() -> str:
    """Return the Markdown table: an entry a line, the lowest mean first."""
    lines = []
    for name, rows in pd.read_csv(RUNS).groupby("name"):
        by_seed = rows.groupby("seed")[["fid", "kid"]].mean()
        of, first = interval(by_seed.fid.tolist()), rows.iloc[0]
        price = rows.flops_per_sample.max() / 1e9
        cells = [name, f"{of.mean:.2f} ± {of.half:.2f}", f"{by_seed.kid.mean():.3f}", len(by_seed)]
        cells += [f"{price:.2g}", first.change, first.date, f"`{first.code}`"]
        lines.append((of.mean, "| " + " | ".join(map(str, cells)) + " |"))
    titles = ["entry", "Fréchet distance", "kernel distance", "seeds", "GFLOPs a sample"]
    head = "| " + " | ".join([*titles, "what it changed", "date", "commit"]) + " |"
    return "\n".join([head, "|---" * 8 + "|", *(line for _, line in sorted(lines))])


def filled(text: str) -> str:
    """Return the page with its table made from the records."""
    return re.sub(
        r"(<!-- board -->\n)(?:.*?\n)?(<!-- end -->)",
        lambda m: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL,
    )  # fmt: skip


if __name__ == "__main__":
    if len(sys.argv) == 4:
        add(Path(sys.argv[1]), *sys.argv[2:])
    PAGE.write_text(filled(PAGE.read_text()))
