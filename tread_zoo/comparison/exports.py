"""A comparison's numbers for other programs: results.csv and results.json."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tread_zoo.comparison.grid import Cell
from tread_zoo.comparison.machines import Machines
from tread_zoo.comparison.results import RunResult

PLAIN = (
    "parameters", "flops", "flops_dense", "flops_per_sample", "seconds", "images_per_s",
    "peak_memory_bytes", "num_steps", "images", "num_processes", "failed",
)  # fmt: skip
MACHINE = {  # column -> what the machine says; `precision` is a score
    "device": "device",
    "machine_precision": "precision",
    "torch": "torch",
    "matmul_flops_per_s": "matmul_flops_per_s",
}


def write_exports(cells: Sequence[Cell], results: Sequence[RunResult], out: Path) -> None:
    """Write `results.csv` and `results.json` to `out`: a row and a record for each run.

    What was not measured is empty in the one, and null in the other.
    """
    machines = Machines(results)
    rows: list[dict[str, object]] = [
        {**cell.choices, **_row(result, machines)}
        for cell, result in zip(cells, results, strict=True)
    ]
    fields = list(dict.fromkeys(key for row in rows for key in row))
    with (out / "results.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, fields, restval="")
        writer.writeheader()
        writer.writerows(_with_null(rows))
    records = [
        {"choices": dict(cell.choices), **_record(result)}
        for cell, result in zip(cells, results, strict=True)
    ]
    text = json.dumps(_with_null(records), indent=1, allow_nan=False)
    (out / "results.json").write_text(text + "\n")


def _record(result: RunResult) -> dict[str, Any]:
    """Return all of a result but where its picture lies, and what curves.csv has summed up."""
    record = asdict(result)
    del record["picture"], record["stages"]
    return record


def _row(result: RunResult, machines: Machines) -> dict[str, object]:
    levels = {f"held_out_loss_{i}": loss for i, loss in enumerate(result.by_level)}
    return {
        **result.values,
        **levels,
        **{name: getattr(result, name) for name in PLAIN},
        "of_peak_flops": machines.utilisation(result),
        **{name: result.machine[key] for name, key in MACHINE.items() if key in result.machine},
        **{f"seconds_{phase}": seconds for phase, seconds in result.phases.items()},
    }


def _with_null(value: Any) -> Any:
    """Return `value` with None in the place of numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {key: _with_null(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
