"""Grids of processes: every combination of swept overrides, each one a command of its own.

A cell whose result is there is left alone, and one that was cut off continues, so the same command
again takes a grid up where it stopped. No cell runs on without the process that began it, however
that ended (killed outright: on Linux).
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from tread_zoo.data.files import write_text
from tread_zoo.runs.folder import is_locked

POLL_S = 0.2
PATIENCE_S = 60.0  # for a process that ends, which may be saving
SET_HERE = ("run_dir", "resume", "overwrite", "checkpoint", "out")


@dataclass(frozen=True)
class Cell:
    """One process of a grid: a file name that tells it from the others; the swept values by field,
    as in {"backbone": "dit_tiny", "seed": "0"}; what is run; the file that it leaves when it has
    ended well; a file for its output."""

    name: str
    choices: Mapping[str, str]
    command: tuple[str, ...]
    result: Path
    log: Path


def expand(
    grids: Sequence[Mapping[str, Sequence[str]]], fixed: Sequence[str] = ()
) -> list[tuple[dict[str, str], list[str]]]:
    """Return (choices, overrides) of every combination of the swept values, each once.

    The first seed of all settings comes before the second of any, so that a comparison that is
    stopped early has something to show for each.

    Args:
        grids: values by field, each grid swept on its own.
        fixed: overrides that all have.

    Raises:
        ValueError: a field that the comparison sets itself, or no cell at all.
    """
    fields = [field for grid in grids for field in grid]
    for field in (*fields, *(text.partition("=")[0].lstrip("+~") for text in fixed)):
        if field in SET_HERE:
            raise ValueError(f"{field} is set by the comparison; use compare.out for its folder.")
    combinations = [
        dict(zip(grid, values, strict=True))
        for grid in grids
        for values in itertools.product(*grid.values())
    ]
    cells = list({tuple(choices.items()): choices for choices in combinations}.values())
    if not cells:
        raise ValueError("compare.grids has no cell: choose a study, as in compare.study=rates.")
    seeds = list(dict.fromkeys(choices.get("seed") for choices in cells))
    cells.sort(key=lambda choices: seeds.index(choices.get("seed")))
    return [(choices, [*fixed, *(f"{k}={v}" for k, v in choices.items())]) for choices in cells]


def check_same_commands(cells: Sequence[Cell], out: Path) -> None:
    """Check cells against those that `out` was made with, which `cells.json` has, and note them.

    Raises:
        ValueError: a cell of the same name had other overrides, so its run is of other settings.
    """
    file = out / "cells.json"
    earlier = json.loads(file.read_text()) if file.exists() else {}
    for cell in cells:
        now, before = (
            {text for text in texts if text.partition("=")[0] not in SET_HERE}
            for texts in (cell.command[2:], earlier.get(cell.name, cell.command[2:]))
        )
        if now != before and cell.result.parent.exists():
            raise ValueError(
                f"{out} has {cell.name} with {' '.join(sorted(before - now)) or 'fewer overrides'} "
                f"instead of {' '.join(sorted(now - before)) or 'these'}; choose another "
                "compare.out, or remove that folder."
            )
    out.mkdir(parents=True, exist_ok=True)
    commands = {**earlier, **{cell.name: cell.command[2:] for cell in cells}}
    write_text(file, json.dumps(commands, indent=1))


def run_cells(
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    devices: Sequence[str] = (),
    stream: TextIO | None = None,
) -> dict[str, str]:
    """Run the cells that have no result yet, and return why each that failed did, by name.

    Ctrl-C ends the processes, which save what they have, and is raised again. A cell that another
    process trains, perhaps one that is saving because its comparison was killed, is waited for.

    Args:
        cells: the grid.
        jobs: how many run at a time.
        devices: for CUDA_VISIBLE_DEVICES; with several, cells that run together take turns.
        stream: where a table of the scores grows as cells end, on a terminal above a bar that shows
            the last line of a cell; None is the standard output.
    """
    stream = stream or sys.stdout
    done = [cell for cell in cells if cell.result.exists()]
    todo = [cell for cell in cells if cell not in done]
    count = f"{len(cells)} cell{'s' * (len(cells) != 1)}"
    logs = f"; output in {todo[0].log.parent}" if todo else ""
    print(f"{count}, {len(done)} of them done{logs}", file=stream, flush=True)
    queue = _Queue(cells, deque(todo), jobs, devices, stream)
    try:
        for cell in done:
            queue.say(queue.table.row(cell))
        while queue.waiting or queue.running:
            queue.start()
            time.sleep(POLL_S)
            queue.collect()
    finally:  # nothing runs on, whatever ends this
        _end([process for _, process in queue.running.values()])
        queue.bar.close()
    return queue.failed


class _Queue:
    """Cells that wait, those that run by place (0 … jobs - 1), why those that failed did, and what
    is shown of all."""

    def __init__(
        self,
        cells: Sequence[Cell],
        waiting: deque[Cell],
        jobs: int,
        devices: Sequence[str],
        stream: TextIO,
    ) -> None:
        self.waiting, self.jobs, self.devices, self.stream = waiting, jobs, devices, stream
        self.running: dict[int, tuple[Cell, subprocess.Popen[bytes]]] = {}
        self.failed: dict[str, str] = {}
        self.awaited: set[str] = set()
        self.table = ScoreTable(cells)
        self.bar = tqdm(
            total=len(cells), initial=len(cells) - len(waiting), unit="cell", file=stream,
            dynamic_ncols=True, disable=not stream.isatty(),
        )  # fmt: skip

    def say(self, text: str) -> None:
        self.bar.write(text, file=self.stream)
        self.stream.flush()

    def start(self) -> None:
        """Start cells where there is room, but for those that another process trains."""
        free = sorted(set(range(self.jobs)) - set(self.running))
        for place in free[: len(self.waiting)]:
            cell = self.waiting.popleft()
            if is_locked(cell.result.parent):
                self.waiting.append(cell)
                if cell.name not in self.awaited:
                    self.awaited.add(cell.name)
                    self.say(f"{cell.name}  another process trains it: waiting until that ends")
            elif cell.result.exists():  # of that process
                self.bar.update()
                self.say(self.table.row(cell))
            else:
                with _signals_held_back():  # else a process that was just begun might run on
                    self.running[place] = cell, _start(cell, place, self.jobs, self.devices)

    def collect(self) -> None:
        """Report the cells that have ended."""
        for place, (cell, process) in list(self.running.items()):
            status, last = process.poll(), _last_line(cell.log)
            self.bar.set_postfix_str(last[:60])
            if status is None:
                continue
            del self.running[place]
            self.bar.update()
            if not cell.result.exists():
                output = f"{last or 'no output'} ({cell.log})"
                self.failed[cell.name] = f"exit status {status}: {output}"
            self.say(self.table.row(cell, self.failed.get(cell.name)))


class ScoreTable:
    """Lines of text for the scores of cells, the first under its head."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.width = max((len(cell.name) for cell in cells), default=0)
        self.names: list[str] = []  # of scores, as the first record has them

    def row(self, cell: Cell, failure: str | None = None) -> str:
        """Return the line of a cell that ended."""
        if failure is not None:
            return f"{cell.name:{self.width}}  failed, {failure}"
        values, head = json.loads(cell.result.read_text())["values"], ""
        if not self.names:
            self.names = list(values)
            head = f"{'':{self.width}}  {'  '.join(f'{name:>9}' for name in self.names)}\n"
        texts = (f"{values.get(name, math.nan):>{max(9, len(name))}.4g}" for name in self.names)
        return f"{head}{cell.name:{self.width}}  {'  '.join(texts)}"


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Have SIGINT, SIGTERM and SIGHUP wait until the block is left."""
    held: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, frame: held.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for signal_held in held[:1]:
        signal.raise_signal(signal_held)


def _start(cell: Cell, place: int, jobs: int, devices: Sequence[str]) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        if len(devices) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    alive, ours = os.pipe()
    with cell.log.open("wb") as log:
        process = subprocess.Popen(
            cell.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True, pass_fds=(alive,),
        )  # fmt: skip
    if sys.platform == "linux":
        # Once `ours` is closed, by this process or by its death, the cell's group gets SIGTERM.
        fcntl.fcntl(alive, fcntl.F_SETOWN, -process.pid)
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)
    os.close(alive)
    weakref.finalize(process, os.close, ours)
    return process


def _last_line(log: Path) -> str:
    """Return the last line of a log, or what a progress bar shows at its end."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        text = stream.read().decode(errors="replace")
    return next((line.strip() for line in re.split(r"[\r\n]", text)[::-1] if line.strip()), "")


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """End processes and their children: gently, and by force after a while or a second Ctrl-C."""
    _signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    try:
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        _signal(processes, signal.SIGKILL)


def _signal(processes: Sequence["subprocess.Popen[bytes]"], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
