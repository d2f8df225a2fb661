"""Make the tables and figures of every record that still grows, from its .csv files.

python docs/comparison/tables.py                         # from the .csv files alone
python docs/comparison/tables.py equal_cost RUNS STUDY   # add runs first, as the record's page says

A record is a folder with a `page.py`. Its `tables()` returns Markdown by name, to be put between
`<!-- name -->` and `<!-- end -->` in the files of its `PAGES`. It may have `draw()`, which makes
its figures, and `add(*arguments)`, which adds rows to its .csv files.
"""

import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy import stats

from tread_zoo.comparison.intervals import LEVEL, Interval

matplotlib.use("agg")
HERE = Path(__file__).parent
RECORDS = {file.parent.name: file for file in sorted(HERE.parent.glob("**/page.py"))}


def markdown(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table of a line of column names and rows of cells."""
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def p_value(log: Interval) -> float:
    """Return the p-value of a log ratio that is paired by seed."""
    error = log.half / stats.t.ppf((1 + LEVEL) / 2, log.n - 1)
    return float(2 * stats.t.sf(abs(log.mean) / error, log.n - 1))


def corrected(p_values: Iterable[float]) -> np.ndarray:
    """Return p-values with Holm's correction for their number."""
    values = np.array(list(p_values))
    order = np.argsort(values)
    found = np.empty(len(values))
    found[order] = np.maximum.accumulate(values[order] * range(len(values), 0, -1)).clip(max=1)
    return found


def pages(names: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of each page of a record, with new tables. `names` are the names that its
    page.py defines."""
    texts = {file: file.read_text() for file in names["PAGES"]}
    for name, table in names["tables"]().items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        for file, text in texts.items():
            texts[file] = re.sub(place, rf"\g<1>{table}\n\2", text, flags=re.DOTALL)
    return texts


def main(record: str = "", *arguments: str) -> None:
    for name, file in RECORDS.items():
        names = runpy.run_path(str(file))
        if name == record:
            names["add"](*arguments)
        if "draw" in names:
            names["draw"]()
        for page, text in pages(names).items():
            page.write_text(text)


if __name__ == "__main__":
    main(*sys.argv[1:])
