"""One self-contained HTML page: what was compared, the plots, the table, samples side by side."""

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tread_zoo.comparison.grid import Cell
from tread_zoo.comparison.groups import Group, group_runs
from tread_zoo.comparison.plots import AGAINST, draw_plots
from tread_zoo.comparison.results import RunResult
from tread_zoo.comparison.table import (
    PAIRED,
    Table,
    check_protocols,
    describe_protocol,
    paired_table,
    remarks,
    scores_table,
)
from tread_zoo.comparison.words import read_out

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2rem }
pre { background: #f4f4f4; padding: .7rem; overflow-x: auto }
.plots, .samples { display: flex; flex-wrap: wrap; gap: 1rem }
figure { margin: 0 } figcaption { font-size: .85rem; color: #555 }
.plots img { width: 37rem; max-width: 100% } .plots .whole img { width: 75rem }
.samples img { image-rendering: pixelated }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #ddd; white-space: nowrap }
th { text-align: left; cursor: pointer }
"""
# A click on a head sorts by the first number of the cells in its column, or by their text.
SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  table.querySelectorAll("th").forEach((head, column) => head.addEventListener("click", () => {
    const body = table.tBodies[0];
    const key = row => {
      const text = row.cells[column].textContent, number = parseFloat(text);
      return Number.isNaN(number) ? text : number;
    };
    const up = head.dataset.up = head.dataset.up === "1" ? "0" : "1";
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      return (x < y ? -1 : x > y ? 1 : 0) * (up === "1" ? 1 : -1);
    });
    body.append(...rows);
  }));
}
"""


def write_page(
    cells: Sequence[Cell],
    results: Sequence[RunResult],
    out: Path,
    *,
    title: str,
    command: str,
    equal: str = "steps",
) -> Path:
    """Write `index.html` and `plots/*.png` to `out`; the page needs no other file.

    Args:
        cells, results, out, title, command, equal: see `write_report`.

    Raises:
        ValueError: the runs were scored by different protocols.
    """
    check_protocols(cells, results, equal)
    groups = group_runs(cells, results)
    plots = draw_plots(groups, out / "plots")
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<pre>{escape(command)}</pre>",
        f"<p>{escape(describe_protocol(groups, equal))}</p>",
        *_sentences(read_out(groups)),
        "<h2>Plots</h2>",
        '<div class="plots">',
        *(_figure(path, name, whole=name.endswith(AGAINST)) for name, path in plots.items()),
        "</div>",
        "<h2>Numbers</h2>",
        _table(scores_table(groups)),
        *(f"<p>{escape(text)}</p>" for text in remarks(groups)),
    ]
    pairs = paired_table(groups)
    if pairs[1]:
        parts += [f"<p>{escape(PAIRED)}</p>", _table(pairs)]
    pictures = [(group, picture) for group in groups if (picture := _picture(group))]
    if pictures:
        parts += [
            "<h2>Samples</h2>",
            "<p>From the same noise and labels in all; the first seed of each setting, its "
            "averaged weights at the last step. Nothing was picked.</p>",
            '<div class="samples">',
            *(_figure(picture, group.label) for group, picture in pictures),
            "</div>",
        ]
    path = out / "index.html"
    path.write_text(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script>\n</body></html>\n"
    )
    return path


def _sentences(lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["<h2>In words</h2>", "<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"]


def _figure(path: Path, caption: str, *, whole: bool = False) -> str:
    """Return a picture as HTML, over the whole width or half of it."""
    data = base64.b64encode(path.read_bytes()).decode()
    kind = ' class="whole"' if whole else ""
    return (
        f'<figure{kind}><img alt="{escape(caption)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _picture(group: Group) -> Path | None:
    """Return the samples of the first seed that has any."""
    found = (Path(run.picture) for run in group.ended.values() if run.picture)
    return next((path for path in found if path.exists()), None)


def _table(table: Table) -> str:
    header, rows = table
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(text.strip('`'))}</td>" for text in row) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )
