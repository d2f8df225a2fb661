"""Grids of processes: one command for every combination of swept overrides.

A process of the grid is a cell. A cell whose result exists is skipped, and an interrupted one
continues, so the same command resumes a grid. Cells end when the process that started them ends; on
Linux, also when it is killed.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tqdm import tqdm

from tread_zoo.credentials import without_credentials
from tread_zoo.data.files import write_text
from tread_zoo.runs.folder import is_locked

POLL_S = 0.2
PATIENCE_S = 60.0  # time for a process to end: it may be saving
SET_HERE = ("run_dir", "resume", "overwrite", "checkpoint", "out")


@dataclass(frozen=True)
class Cell:
    """One process of a grid: its command, and the files that it writes.

    Args:
        name: a file name, unique in the grid.
        choices: the swept values by field, as in {"backbone": "dit_tiny", "seed": "0"}.
        command: the words of its command line.
        result: the file that it writes when it succeeds.
        log: file with its output.
    """

    name: str
    choices: Mapping[str, str]
    command: tuple[str, ...]
    result: Path
    log: Path


def expand(
    grids: Sequence[Mapping[str, Sequence[str]]], fixed: Sequence[str] = ()
) -> list[tuple[dict[str, str], list[str]]]:
    """Return a pair for each combination of swept values: its values by field, and all overrides of
    its command. A combination that occurs in several grids is returned once.

    All combinations with the first seed come before any with the second, so that a comparison that
    is stopped early has a result for each of the other settings.

    Args:
        grids: swept values by field; each grid is swept on its own.
        fixed: overrides of all commands.

    Raises:
        ValueError: a field is set by the comparison itself, or there are no combinations.
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
    """Compare the commands of `cells` with earlier ones in `out`/cells.json, and add them to that
    file.

    Raises:
        ValueError: a cell of the same name was run with other overrides.
    """
    file = out / "cells.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for cell in cells:
        now, before = (
            {without_credentials(t) for t in texts if t.partition("=")[0] not in SET_HERE}
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
    write_text(file, json.dumps(without_credentials(commands), indent=1))


def run_cells(
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    devices: Sequence[str] = (),
    stream: TextIO | None = None,
) -> dict[str, str]:
    """Run the cells that have no result yet; return why cells failed, by the cell's name.

    Ctrl-C ends the processes, which save their state, and is raised again. A cell that another
    process is still training is waited for: that process may be saving, because its comparison was
    killed.

    Args:
        cells: the grid.
        jobs: processes at a time.
        devices: values for CUDA_VISIBLE_DEVICES; cells that run together cycle through them.
        stream: where a line with the scores of each cell is written; None: standard output. A
            terminal also gets a progress bar with the last line of a cell's log.
    """
    stream = stream or sys.stdout
    done = [cell for cell in cells if cell.result.exists()]
    waiting = deque(cell for cell in cells if cell not in done)
    running: dict[int, tuple[Cell, subprocess.Popen[bytes]]] = {}  # by slot, 0 … jobs - 1
    failed, awaited = dict[str, str](), set[str]()
    bar = tqdm(total=len(cells), initial=len(done), unit="cell", file=stream, dynamic_ncols=True,
               disable=not stream.isatty())  # fmt: skip

    def say(cell: Cell, text: str = "") -> None:
        bar.write(f"{cell.name}  {text or _scores(cell)}", file=stream)
        stream.flush()

    logs = f"; output in {waiting[0].log.parent}" if waiting else ""
    print(
        f"{len(cells)} cell{'s' * (len(cells) != 1)}, {len(done)} of them done{logs}", file=stream
    )
    try:
        for cell in done:
            say(cell)
        while waiting or running:
            for slot in sorted(set(range(jobs)) - running.keys())[: len(waiting)]:
                cell = waiting.popleft()
                if is_locked(cell.result.parent):
                    waiting.append(cell)
                    if cell.name not in awaited:
                        say(cell, "another process trains it: waiting until that ends")
                    awaited.add(cell.name)
                elif cell.result.exists():  # the other process finished
                    bar.update()
                    say(cell)
                else:
                    running[slot] = cell, _start(cell, slot, jobs, devices)
            time.sleep(POLL_S)
            for slot, (cell, process) in list(running.items()):
                status, last = process.poll(), _last_line(cell.log)
                bar.set_postfix_str(last[:60])
                if status is None:
                    continue
                del running[slot]
                bar.update()
                if not cell.result.exists():
                    output = f"{last or 'no output'} ({cell.log})"
                    failed[cell.name] = f"exit status {status}: {output}"
                say(cell, f"failed, {failed[cell.name]}" if cell.name in failed else "")
    finally:  # no process outlives this one
        _end([process for _, process in running.values()])
        bar.close()
    return failed


def _scores(cell: Cell) -> str:
    values = json.loads(cell.result.read_text(encoding="utf-8"))["values"]
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def _start(cell: Cell, slot: int, jobs: int, devices: Sequence[str]) -> "subprocess.Popen[bytes]":
    environment = dict(os.environ)
    if jobs > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
        if len(devices) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    alive, ours = os.pipe()
    with cell.log.open("wb") as log:
        process = subprocess.Popen(
            cell.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True, pass_fds=(alive,),
        )  # fmt: skip
    if sys.platform == "linux":
        # When this process closes `ours` or dies, the cell's process group gets SIGTERM.
        fcntl.fcntl(alive, fcntl.F_SETOWN, -process.pid)
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC)
    os.close(alive)
    weakref.finalize(process, os.close, ours)
    return process


def _last_line(log: Path) -> str:
    """Return the last line of a log, or the last state of a progress bar in it."""
    if not log.exists():
        return ""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 4096))
        text = stream.read().decode(errors="replace")
    return next((line.strip() for line in re.split(r"[\r\n]", text)[::-1] if line.strip()), "")


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Terminate processes and their children; kill them after a timeout or a second Ctrl-C."""
    deadline = time.monotonic() + PATIENCE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            for process in processes:
                process.wait(max(0.0, deadline - time.monotonic()))
