"""A training run killed at random moments and resumed must end as one that never was.

    unbroken run -> (start or resume -> wait for a moment -> signal -> wait for the end) * rounds
                 -> resume to the last step -> compare

Every process is a real one, and so is every signal: SIGKILL and SIGTERM in turn, to one process or
to all, at a step or while a checkpoint is being written. Processes are forked from a server that
has loaded the libraries, so a start costs a second. Which images a step reads is written down by
each process before it reads them.
"""

import ast
import json
import logging
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tread_zoo.data import StepBatches
from tread_zoo.training.checkpoints import CheckpointError, find_checkpoint
from tread_zoo.training.trackers import read_metrics

logger = logging.getLogger(__name__)

END_SECONDS = 60.0  # in which all processes must end once one was told to, or died
START_SECONDS = 180.0
PRELOAD = (  # what a run imports on its way
    "tread_zoo.training.loop", "accelerate", "matplotlib.figure", "sklearn.datasets", "sklearn.svm",
    "torch._dynamo", "torch.utils.flop_counter",
)  # fmt: skip
RUNS = ("unbroken", "broken")
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")


@dataclass
class Soak:
    """The settings of a soak test and what went wrong in it so far."""

    run: Mapping[str, Any]
    out: Path
    num_processes: int
    random: random.Random
    problems: list[str] = field(default_factory=list)
    started: list[BaseProcess] = field(default_factory=list)

    def start(self, name: str, resume: str | None) -> list[BaseProcess]:
        """Start all processes of a run in `out/name`."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, *PRELOAD])
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        keywords = {
            **self.run, "device": "cpu", "run_dir": str(self.out / name), "resume": resume,
            "overwrite": resume is None,
        }  # fmt: skip
        processes: list[BaseProcess] = [
            context.Process(target=_rank, args=(keywords, rank, self.num_processes, port))
            for rank in range(self.num_processes)
        ]
        for process in processes:
            process.start()
            self.started.append(process)
        return processes

    def close(self) -> None:
        """Leave no process behind."""
        for process in self.started:
            if process.is_alive():
                process.kill()
                process.join()

    def end(self, processes: list[BaseProcess], seconds: float) -> list[int]:
        """Wait until all have ended; return their exit codes. What does not end is a problem."""
        deadline = time.monotonic() + seconds
        for rank, process in enumerate(processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                self.problems.append(f"rank {rank} had not ended after {seconds:.0f} s")
                process.kill()
                process.join()
        return [int(process.exitcode or 0) for process in processes]

    def round(self, number: int, before: int) -> str | None:
        """Start or resume, kill, and return what happened; None if the run ended first."""
        kind = (signal.SIGKILL, signal.SIGTERM)[number % 2]
        while_saving = number % 3 == 2
        one = [0] if while_saving else [self.random.randrange(self.num_processes)]  # rank 0 saves
        victims = self.random.choice([one, None])
        ahead = self.random.randint(1, 2 * self.run["training"]["checkpoint_every"])
        pause = self.random.uniform(0, 0.03)
        processes = self.start("broken", None if number == 0 else "latest")
        if not self._wait(processes, before + ahead, while_saving):
            codes = self.end(processes, END_SECONDS)
            if any(codes):
                self.problems.append(f"round {number}: ended by itself with {codes}")
            return None
        if not while_saving:
            time.sleep(pause)
        step = _steps_read(self.out / "broken")
        hit = range(self.num_processes) if victims is None else victims
        for rank in hit:
            os.kill(int(processes[rank].pid or 0), kind)
        began = time.monotonic()
        codes = self.end(processes, END_SECONDS)
        took = time.monotonic() - began
        for rank, code in enumerate(codes):
            ended = code == -kind if kind == signal.SIGKILL and rank in hit else code > 0
            if not ended or (kind == signal.SIGTERM and code != 128 + kind):
                self.problems.append(f"round {number}: rank {rank} ended with {code}")
        place = "while saving, " if while_saving else ""
        whom = "all" if victims is None else f"rank {victims[0]}"
        return f"{kind.name} to {whom} {place}about step {step}: exit {codes} in {took:.1f} s"

    def _wait(self, processes: list[BaseProcess], step: int, while_saving: bool) -> bool:
        """Wait until `step` is reached, or a save of it or later is under way."""
        deadline = time.monotonic() + START_SECONDS
        folder = self.out / "broken"
        while all(process.is_alive() for process in processes):
            if time.monotonic() > deadline:
                self.problems.append(f"step {step} was not reached in {START_SECONDS:.0f} s")
                return True
            saving = any((folder / "checkpoints").glob(".partial_*"))
            if _steps_read(folder) > step and (saving or not while_saving):
                return True
            time.sleep(0 if while_saving else 0.002)
        return False


def soak(
    *, run: Mapping[str, Any], out: Path, rounds: int, seed: int, num_processes: int, limit_s: float
) -> bool:
    """Run the test; return whether nothing was lost, and say what happened.

    Args:
        run: keywords of `train`; their device, run_dir, resume and overwrite are set here.
        out: gets the folders `unbroken` and `broken`.
        rounds: kills.
        seed: of moments, kinds and victims.
        num_processes: of each run.
        limit_s: no new round after so many seconds.
    """
    test = Soak(run, out, num_processes, random.Random(seed))
    try:
        return _soak(test, rounds, limit_s)
    finally:
        test.close()


def _soak(test: Soak, rounds: int, limit_s: float) -> bool:
    began, run, out = time.monotonic(), test.run, test.out
    for name in RUNS:
        for file in out.glob(f"{name}/read_by_*"):
            file.unlink()
    if any(test.end(test.start("unbroken", None), limit_s)):
        raise ValueError(f"the unbroken run failed: {_tail(out / 'unbroken')}")
    logger.info("unbroken  %d steps, %.0f s", run["training"]["num_steps"], _since(began))
    done, before = 0, 0
    while done < rounds and _since(began) < limit_s:
        happened = test.round(done, before)
        if happened is None:
            test.problems.append("the run ended before all kills: raise training.num_steps")
            break
        done, before = done + 1, _check_folder(test)
        logger.info("%3d of %d  %s; goes on from step %d", done, rounds, happened, before)
    if any(test.end(test.start("broken", "latest"), START_SECONDS)):
        test.problems.append(f"the last resume failed: {_tail(out / 'broken')}")
    _check_folder(test)
    _compare(test)
    for problem in test.problems:
        logger.error("problem   %s", problem)
    short = f" (of {rounds}: limit_s={limit_s:g} is over)" if done < rounds else ""
    verdict = "nothing was lost" if not test.problems else f"{len(test.problems)} problems"
    logger.info("%d kills%s, %.0f s: %s", done, short, _since(began), verdict)
    return not test.problems


def _rank(keywords: dict[str, Any], rank: int, num_ranks: int, port: int) -> None:
    """Be one process of a run: its output goes to `log_<rank>.txt` in the run's folder."""
    import torch

    from tread_zoo.training import loop, parts

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    folder = Path(keywords["run_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"log_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    parts.StepBatches = _Recorded  # type: ignore[misc]
    _Recorded.file = os.open(
        folder / f"read_by_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )  # one write a line: a kill cannot cut it
    try:
        loop.train(**keywords)
    except (ValueError, FloatingPointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


class _Recorded(StepBatches):
    """Writes down the images of each micro-step before they are read."""

    file = -1

    def __iter__(self) -> Iterator[list[int]]:
        for step, indices in enumerate(super().__iter__(), start=self.start_step):
            os.write(self.file, f"{step} {indices}\n".encode())
            yield indices


def _check_folder(test: Soak) -> int:
    """Read every checkpoint of the broken run; return the newest one's step, 0 without any."""
    steps = [0]
    for path in sorted((test.out / "broken" / "checkpoints").glob("step_*")):
        try:
            steps.append(find_checkpoint(path).step)
        except CheckpointError as error:
            test.problems.append(f"unreadable: {error}")
    return steps[-1]


def _compare(test: Soak) -> None:
    """Note every difference between the two runs' ends, and in what their steps read."""
    ends = [find_checkpoint(test.out / name) for name in RUNS]
    if ends[0].step != ends[1].step:
        test.problems.append(f"it ended at step {ends[1].step}, not {ends[0].step}")
    for name in FILES:
        one, other = ((end.path / name).read_bytes() for end in ends)
        if one != other:
            test.problems.append(f"{name} of step {ends[0].step} differs")
    losses = [row["step"] for row in read_metrics(test.out / "broken") if "loss" in row]
    if losses != sorted(set(losses)):
        test.problems.append(f"metrics.jsonl has steps twice or out of order: {losses}")
    unbroken, broken = (_read(test.out / name, test.num_processes) for name in RUNS)
    for rank, step in unbroken:
        if broken.get((rank, step)) != unbroken[rank, step]:
            test.problems.append(f"micro-step {step} of rank {rank} read other images, or none")
    options = json.loads((test.out / "broken" / "config.json").read_text())
    num_images, batch = options["data"]["num_images"], options["training"]["batch_size"]
    per_epoch = num_images // (batch * test.num_processes)
    seen: dict[int, list[int]] = {}
    for (_, step), several in broken.items():
        for indices in several:
            seen.setdefault(step // per_epoch, []).extend(indices)
    for epoch, images in seen.items():
        if len(set(images)) != len(images):
            test.problems.append(f"epoch {epoch} read an image twice")


def _read(folder: Path, num_processes: int) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """Return the images by (rank, micro-step); a step that was done again may have read others."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for rank in range(num_processes):
        for line in (folder / f"read_by_{rank}").read_text().splitlines():
            step, _, indices = line.partition(" ")
            found.setdefault((rank, int(step)), set()).add(tuple(ast.literal_eval(indices)))
    return found


def _steps_read(folder: Path) -> int:
    """Return the micro-steps that the main process has begun, counting from the run's start."""
    try:
        with (folder / "read_by_0").open("rb") as file:
            file.seek(-min(4096, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().splitlines()
        return int(lines[-1].split()[0]) + 1 if lines else 0
    except OSError:
        return 0


def _tail(folder: Path) -> str:
    return " | ".join((folder / "log_0.txt").read_text().splitlines()[-3:])


def _since(began: float) -> float:
    return time.monotonic() - began
