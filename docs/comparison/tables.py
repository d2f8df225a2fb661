"""Make the tables and figures of every page anew from the records beside it.

python docs/comparison/tables.py                      # from the .csv files alone
python docs/comparison/tables.py parts RUNS_FOLDER …  # add runs to a record first, as its page says

A record is a folder with a `page.py`. Its `tables()` returns Markdown by name: what stands between
`<!-- name -->` and `<!-- end -->` of its README.md, or of the files in its `PAGES`. It may have
`draw()`, which makes its figures, and `add(*arguments)`, which adds rows to its .csv files.
"""

import json
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from tread_zoo.comparison.findings import direction
from tread_zoo.comparison.intervals import interval

matplotlib.use("agg")
HERE = Path(__file__).parent
RECORDS = {file.parent.name: file for file in sorted(HERE.parent.glob("**/page.py"))}
DIGITS = {"fid": 2, "kid": 2, "precision": 3, "recall": 3, "label_accuracy": 3, "held_out_loss": 3}


def markdown(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table. The columns that a row lacks stay empty."""
    width = head.count("|") - 1
    lines = [head, "|---" * width + "|"]
    for row in rows:
        cells = [str(cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |" + " |" * (width - len(cells)))
    return "\n".join(lines)


def with_verdict(differences: pd.DataFrame, digits: Mapping[str, int] = DIGITS) -> list[str]:
    """Return the 95 % interval of the differences in each column, a metric; bold and with a verdict
    where it is settled."""
    columns = differences.items()
    return [interval(by).with_verdict(direction(m) or "lower", digits[m]) for m, by in columns]


def percent(fractions: pd.Series, digits: int = 0) -> str:
    """Return the mean of fractions in percent."""
    return f"{100 * fractions.mean():.{digits}f} %"


def scores(runs: str | Path, files: str = "score.json") -> Iterator[tuple[Path, Any, Any]]:
    """Yield the folder, the settings and the record of each score of a folder of runs.

    Args:
        files: pattern of their names. `score_*.json` are those of evaluate.py.
    """
    for file in sorted(Path(runs).glob(f"*/{files}")):
        config = json.loads((file.parent / "config.json").read_text())
        yield file.parent, config, json.loads(file.read_text())


def processor() -> str:
    """Return the name of this machine's processor, or "" where Linux does not say it."""
    file = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.*)$", file.read_text() if file.exists() else "", re.M)
    return names[0] if names else ""


def add_rows(rows: Iterable[Mapping[str, Any]], file: Path, keys: list[str]) -> None:
    """Write rows to a .csv file in place of those of the same keys. Its others stay: their runs may
    be of another machine."""
    table = pd.concat([pd.read_csv(file), pd.DataFrame(rows)]).drop_duplicates(keys, keep="last")
    table.to_csv(file, index=False, float_format="%.6g")


def fill(text: str, tables: Mapping[str, str]) -> str:
    """Return a page with these tables, each at its name."""
    for name, table in tables.items():
        place = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        text = re.sub(place, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
    return text


def pages(names: Mapping[str, Any]) -> dict[Path, str]:
    """Return the text of each page of a record with the tables of today.

    Args:
        names: those of its page.py.
    """
    tables, default = names["tables"](), [names["HERE"] / "README.md"]
    return {file: fill(file.read_text(), tables) for file in names.get("PAGES", default)}


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
