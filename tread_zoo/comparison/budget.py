"""Equal budgets: how many optimizer steps of a setting cost what another's cost.

    equal=flops     steps = budget / (FLOPs of a step), the budget being what the dearest setting
                    spends in its own training.num_steps
    equal=seconds   steps = seconds / (seconds of a step), timed once on this machine

Where the routing changes over a run, a step costs its mean over the run, in FLOPs as in seconds.

A learning-rate schedule then ends with its own run, as it should: none is cut off.
"""

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tread_zoo.comparison.grid import Cell, parts_of
from tread_zoo.comparison.results import RunResult
from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.flops import training_flops
from tread_zoo.kernels import set_forms
from tread_zoo.process_group import take_connections
from tread_zoo.routing import PathDrop
from tread_zoo.runtime import describe_device, resolve_device, resolve_precision
from tread_zoo.seeding import make_generator
from tread_zoo.training.files import write_text
from tread_zoo.training.loop import make_accelerator, optimize, set_up
from tread_zoo.training.options import FAULTS
from tread_zoo.training.parts import Parts, draw_routes
from tread_zoo.training.window import Window

EQUAL = ("steps", "flops", "seconds")
SPEEDS = "speeds.json"
TOLERANCES = {"flops": 0.02, "seconds": 0.1}  # of runs that are there, beside the largest
TIMED_STEPS = 8  # shared by the kinds of steps, with 3 at least for each
WARM_UP_STEPS = 2
LOOKED_AT = 2000  # steps of a stage, for one of a kind
DENSE, ROUTED, DROPPED = ("dense",), "routed", "dropped"
# Of the training; what is not named here is taken to decide how long a step takes.
NOT_OF_SPEED = (
    *FAULTS, "learning_rate", "schedule", "warmup_steps", "weight_decay", "beta1", "beta2",
    "ema_decay", "label_dropout", "log_every", "sample_every", "score_every", "checkpoint_every",
    "keep_checkpoints",
)  # fmt: skip

Compose = Callable[[Sequence[str]], dict[str, Any]]


def check_equal(equal: str, seconds: float | None, *, collected: bool = False) -> None:
    """Raise `ValueError` unless `equal` is known and has what it needs: see `equalise`.

    collected: the runs are there; they have their seconds already.
    """
    if equal not in EQUAL:
        raise unknown_name("compare.equal", equal, EQUAL)
    if collected and seconds is not None:
        raise ValueError(
            f"compare.seconds={seconds}: compare.runs takes runs as they are; leave it out."
        )
    timed = equal == "seconds" and not collected
    if (seconds is not None) != timed or (seconds is not None and seconds <= 0):
        raise ValueError(
            f"compare.seconds={seconds} with compare.equal={equal}: equal=seconds needs a number "
            "of seconds for each run, the others take none."
        )


def check_equal_runs(cells: Sequence[Cell], results: Sequence[RunResult], equal: str) -> None:
    """Raise `ValueError` if runs that are there did not spend the same: FLOPs of all training
    within 2 %, seconds within 10 %. (Steps are a part of the protocol.)"""
    if equal == "steps":
        return
    spent = [
        (run.flops * run.images if equal == "flops" else run.seconds, cell.folder)
        for cell, run in zip(cells, results, strict=True)
        if not run.failed
    ]
    if not spent:
        return
    (low, cheap), (high, dear) = min(spent), max(spent)
    if not high - low <= TOLERANCES[equal] * high:
        raise ValueError(
            f"compare.equal={equal}: {cheap} trained for {low:.4g} {equal}, {dear} for {high:.4g}, "
            f"which is more than {TOLERANCES[equal]:.0%} apart. Leave one out, or compare them at "
            "equal steps, compare.equal=steps, if they have that."
        )


def equalise(
    cells: Sequence[Cell], compose: Compose, *, equal: str, seconds: float | None, out: Path
) -> list[Cell]:
    """Return the cells with the `training.num_steps` that makes them equal in `equal`.

    Args:
        cells: the runs; those that differ in their seed alone get the same number of steps.
        compose: overrides -> keywords of `train`.
        equal: steps (nothing changes), flops or seconds.
        seconds: of training steps for each run, for equal=seconds.
        out: where the measured speeds are kept, so that the same command again asks for the same
            numbers of steps.

    Raises:
        ValueError: an unknown `equal`, seconds missing or not positive, seconds with several
            processes, or settings that cannot work.
    """
    check_equal(equal, seconds)
    if equal == "seconds" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "compare.equal=seconds times the steps of one process, and each of several would find "
            "other numbers; start one process, or use compare.equal=flops."
        )
    if equal == "steps":
        return list(cells)
    settings = {cell.setting: (cell, compose(cell.overrides)) for cell in cells}
    if equal == "flops":
        costs = {name: _flops_of_a_step(keywords) for name, (_, keywords) in settings.items()}
        budget = max(
            costs[name] * keywords["training"]["num_steps"]
            for name, (_, keywords) in settings.items()
        )
    else:
        assert seconds is not None, "checked above"
        costs, budget = _seconds_of_a_step(settings, out / SPEEDS), seconds
    return [
        replace(
            cell,
            overrides=(
                *cell.overrides,
                f"training.num_steps={max(1, round(budget / costs[cell.setting]))}",
            ),
        )
        for cell in cells
    ]


def _flops_of_a_step(keywords: dict[str, Any]) -> float:
    parts = parts_of(keywords)
    options = parts.options
    images = options.batch_size * options.gradient_accumulation_steps
    return images * training_flops(parts.backbone, parts.routing, options.num_steps)


def _seconds_of_a_step(
    settings: dict[str, tuple[Cell, dict[str, Any]]], file: Path
) -> dict[str, float]:
    """Return the seconds of an optimizer step by setting; what `file` has is not timed again."""
    known = json.loads(file.read_text()) if file.exists() else {}
    found = {}
    for name, (_, keywords) in settings.items():
        facts = _facts_of_speed(keywords)
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        if key not in known:
            set_forms(keywords.get("kernels") or {})
            seconds = time_a_step(parts_of(keywords), keywords["device"])
            where = {name: facts[name] for name in ("device", "cpu", "torch")}
            known[key] = {"setting": name, "seconds": seconds, **where}
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(known, indent=1))
        found[name] = known[key]["seconds"]
    return found


def _facts_of_speed(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return all that the seconds of a step depend on, as plain values."""
    training = {k: v for k, v in keywords["training"].items() if k not in NOT_OF_SPEED}
    return {
        **{group: keywords[group] for group in ("backbone", "routing", "objective", "data")},
        "training": training,
        "kernels": keywords.get("kernels"),
        "device": describe_device(resolve_device(keywords["device"])),
        "cpu": _name_of_cpu(),
        "torch": torch.__version__,
    }


def _name_of_cpu() -> str:
    """Return the processor's name, or what the system says of its kind."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    return platform.processor() or platform.machine()


def kinds_of_steps(parts: Parts) -> list[tuple[float, int]]:
    """Return (share, a step) of each kind of step that a run has: dense, routed at one of its
    rates, or with its paths dropped. The shares are those by which FLOPs are averaged.

    A kind that comes too seldom to be met among the first steps of its stage is left out.
    """
    num_steps, probability = parts.options.num_steps, parts.routing.probability
    shares: dict[tuple[Any, ...], float] = {}
    examples: dict[tuple[Any, ...], int] = {}
    for steps, used in parts.routing.stages(num_steps):
        plans = tuple((plan.start, plan.end, plan.selection_rate) for plan in used.plans)
        routed = probability * len(steps) / num_steps if plans else 0.0
        kinds = {
            DENSE: len(steps) / num_steps - routed,
            (ROUTED, plans): routed * (1 - used.path_drop_probability),
            (DROPPED, plans): routed * used.path_drop_probability,
        }
        for kind, share in kinds.items():
            shares[kind] = shares.get(kind, 0.0) + share
        missing = {kind for kind, share in kinds.items() if share > 0} - examples.keys()
        for step in steps[:LOOKED_AT]:
            if not missing:
                break
            routes = draw_routes(parts, step, 1, make_generator("kind", 0))
            dropped = any(isinstance(route, PathDrop) for route in routes)
            kind = (DROPPED if dropped else ROUTED, plans) if routes else DENSE
            if kind in missing:
                examples[kind] = step
                missing.remove(kind)
    whole = sum(shares[kind] for kind in examples)
    return [(shares[kind] / whole, step) for kind, step in examples.items()]


def time_a_step(parts: Parts, device: str) -> float:
    """Return the seconds of an optimizer step on one process, the mean over the kinds of steps of
    the run as often as each comes, of each the median: data, forward, backward, clipping, AdamW,
    averaging.

    It is the step of the training loop, at a learning rate of 0; kinds take turns.
    """
    place = resolve_device(device)
    precision = resolve_precision(parts.options.precision, place)
    take_connections(place)
    accelerator = make_accelerator(place, precision, parts.options, blocks_may_idle=False)
    learner = set_up(parts, accelerator, None, precision)
    parts.data.codec.prepare(place)
    kinds, batches = kinds_of_steps(parts), _endless_batches(parts)
    times: list[list[float]] = [[] for _ in kinds]
    for turn in range(WARM_UP_STEPS + max(3, TIMED_STEPS // len(kinds))):
        for (_, step), of_kind in zip(kinds, times, strict=True):
            began = time.perf_counter()
            optimize(learner, batches, step, 0.0, Window())
            learner.average.update(parts.backbone, step + 1, learner.guard.applied)
            if place.type == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM_UP_STEPS:
                of_kind.append(time.perf_counter() - began)
    return sum(
        share * statistics.median(of_kind) for (share, _), of_kind in zip(kinds, times, strict=True)
    )


def _endless_batches(parts: Parts) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from parts.batches(0, 1, 0)
