"""What the curves say elsewhere: a block of comments at the head of a recipe, a table of all.

Both stand between fixed marker words and are written from the curve, never by hand.
"""

import statistics
from collections.abc import Mapping, Sequence

from tread_zoo.comparison.markdown import QUALITY, row, spread
from tread_zoo.comparison.reference.curve import Curve

BEGIN = "# --- curve: written by scripts/make_curve.py, not by hand ---"
END = "# --- end of curve ---"
TABLE_BEGIN = "<!-- curves: written by scripts/make_curve.py, not by hand -->"
TABLE_END = "<!-- end of curves -->"
WIDTH = 100
SHOWN = ("held_out_loss", "agreement", "fid", "kid", "fd_dinov2")
HEADER = ("recipe", "hardware", "training, s", "images/s", "result")


def replace_between(text: str, begin: str, end: str, lines: Sequence[str], where: str) -> str:
    """Return `text` with `lines` between the two marker lines.

    Raises:
        ValueError: a marker is missing or comes twice; `where` names the file.
    """
    for marker in (begin, end):
        if text.count(f"{marker}\n") != 1:
            raise ValueError(
                f"{where} has the line {marker!r} {text.count(marker)} times; it must stand there "
                "once, for the curve is written between the two markers."
            )
    head, _, rest = text.partition(f"{begin}\n")
    _, _, tail = rest.partition(f"{end}\n")
    return head + "\n".join([begin, *lines, end, tail])


def recipe_block(curve: Curve) -> list[str]:
    """Return the comment lines of a recipe: command, hardware, time, result."""
    machine = curve.runs[0].machine
    processes = machine.get("num_processes", 1)
    texts = [
        curve.command,
        f"{curve.hardware}, {machine.get('precision')}, torch {machine.get('torch')}"
        f"{f', {processes} processes' if processes > 1 else ''}; data {_data(curve)}: "
        f"{_seconds(curve)} s of training, {_speed(curve)} images/s{_memory(curve)}.",
        f"{_result(curve)}.",
        f"Mean of {len(curve.runs)} seeds, smallest and largest in brackets: the curve is "
        f"curves/{curve.recipe}.json.",
    ]
    return [line for text in texts for line in _wrapped(text)]


def recipe_table(curves: Mapping[str, Curve]) -> list[str]:
    """Return a table of all curves."""
    rows = [
        (
            f"`{name}`",
            f"{curve.hardware}, {curve.runs[0].machine.get('precision')}",
            _seconds(curve),
            _speed(curve),
            f"{_result(curve)}{f'; data: {curve.data_note}' if curve.data_note else ''}",
        )
        for name, curve in sorted(curves.items())
    ]
    return [row(cells) for cells in (HEADER, ["---"] * len(HEADER), *rows)]


def _data(curve: Curve) -> str:
    facts, note = curve.settings["data"], curve.data_note
    return f"{facts['name']} ({facts['num_images']} images{f'; {note}' if note else ''})"


def _seconds(curve: Curve) -> str:
    return spread([curve.seconds_of(run) for run in curve.runs], 1, ".0f")


def _speed(curve: Curve) -> str:
    return spread([run.images_per_s for run in curve.runs], 1, ".0f")


def _memory(curve: Curve) -> str:
    known = [run.peak_memory for run in curve.runs if run.peak_memory is not None]
    return f", {statistics.fmean(known) / 2**20:.0f} MiB" if known else ""


def _result(curve: Curve) -> str:
    texts = []
    for name in SHOWN:
        values = curve.scores_of(name)
        if values:
            title, factor, form = QUALITY[name]
            title, _, unit = title.partition(", ")
            texts.append(f"{title} {spread(values, factor, form)}{' ' + unit if unit else ''}")
    return ", ".join(texts)


def _wrapped(text: str) -> list[str]:
    """Return comment lines; a command is not broken."""
    if text.startswith("python "):
        return [f"# {text}"]
    lines = ["#"]
    for word in text.split():
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("#")
        lines[-1] += f" {word}"
    return lines
