"""Equal budgets: how many optimizer steps of a setting cost what another's cost.

    equal=flops     steps = budget / (FLOPs of a step), the budget being what the dearest setting
                    spends in its own training.num_steps
    equal=seconds   steps = seconds / (seconds of a step), timed once on this machine

A learning-rate schedule then ends with its own run, as it should: none is cut off.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from tread_zoo.comparison.grid import Cell, parts_of
from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.flops import training_flops
from tread_zoo.runtime import autocast, resolve_device, resolve_precision
from tread_zoo.training.loop import losses_of
from tread_zoo.training.parts import Parts, draw_step

EQUAL = ("steps", "flops", "seconds")
SPEEDS = "speeds.json"
TIMED_STEPS = 8
WARM_UP_STEPS = 2

Compose = Callable[[Sequence[str]], dict[str, Any]]


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
    if equal not in EQUAL:
        raise unknown_name("compare.equal", equal, EQUAL)
    if (seconds is not None) != (equal == "seconds") or (seconds is not None and seconds <= 0):
        raise ValueError(
            f"compare.seconds={seconds} with compare.equal={equal}: equal=seconds needs a number "
            "of seconds for each run, the others take none."
        )
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
    missing = {name: keywords for name, (_, keywords) in settings.items() if name not in known}
    for name, keywords in missing.items():
        known[name] = time_a_step(parts_of(keywords), keywords["device"])
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(file)
    return {name: known[name] for name in settings}


def time_a_step(parts: Parts, device: str) -> float:
    """Return the median seconds of an optimizer step on one process, routed as in the middle of the
    run: data, forward, backward and AdamW."""
    place = resolve_device(device)
    precision = resolve_precision(parts.options.precision, place)
    network = parts.backbone.to(place)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)
    first = parts.options.num_steps // 2 * parts.options.gradient_accumulation_steps
    batches = cycle(islice(parts.batches(0, 1, 0), WARM_UP_STEPS))
    times = []
    for step in range(TIMED_STEPS + WARM_UP_STEPS):
        began = time.perf_counter()
        for _ in range(parts.options.gradient_accumulation_steps):
            drawn = draw_step(parts, *next(batches), rank=0, micro_step=first, device=place)
            with autocast(place, precision):
                loss = losses_of(network, parts, drawn).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if place.type == "cuda":
            torch.cuda.synchronize()
        if step >= WARM_UP_STEPS:
            times.append(time.perf_counter() - began)
    return statistics.median(times)
