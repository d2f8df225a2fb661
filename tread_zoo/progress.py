"""Progress of long loops: a bar in a terminal; in other places a log line every half minute.

`TQDM_DISABLE=1` in the environment leaves out both.
"""

import logging
import sys
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

logger = logging.getLogger(__name__)

LINE_EVERY_S = 30.0
BAR = "{desc} {n_fmt}/{total_fmt}{unit} {bar} {percentage:.0f}%{postfix}  left {remaining}"
LINE = "{desc} {n_fmt}/{total_fmt}{unit}  left {remaining}"


class _LogFile:
    """Replaces a terminal for tqdm: each state of a bar becomes a line of the log."""

    def write(self, text: str) -> None:
        if line := text.replace("\x1b[A", "").strip():  # tqdm moves up when a bar closes
            logger.info(line)

    def flush(self) -> None: ...


def progress(
    what: str, items: Any = None, unit: str = "", *, shown: bool = True, **options: Any
) -> Any:
    """Return a tqdm over `items`, or one with `total=…` that `update(n)` advances. Only the main
    process shows it, and a bar appears only after a second.

    Args:
        what: label of the bar.
        items: what to iterate over; None: nothing, call `update`.
        unit: suffix of the count, as in " images".
        shown: False: show nothing.
        options: further options of tqdm.
    """
    if not shown or (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        return tqdm(items, disable=True)
    options = {"unit": unit, "leave": False, "smoothing": 0, **options}
    if sys.stderr.isatty():
        options = {"dynamic_ncols": True, "delay": 1.0, "bar_format": BAR, **options}
        return tqdm(items, what, **options)
    options |= {"mininterval": LINE_EVERY_S, "miniters": 1, "delay": LINE_EVERY_S}
    return tqdm(items, what, file=_LogFile(), bar_format=LINE, **options)
