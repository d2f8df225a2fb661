"""Runs as tables: one row for each run, and their curves.

    runs = read_runs("comparisons/digits/runs/*")
    runs.groupby(["backbone", "routing"]).fid.agg(["mean", "std", "count"])
    curves = read_curves(runs.folder)
    curves.query("metric == 'held_out_loss'").pivot(index="step", columns="folder", values="value")

A run's folder has `config.json` (its `RunConfig`), `facts.json` (data, size, FLOPs),
`metrics.jsonl` (what was logged), and once it was scored `scores.jsonl` and `score.json`. Nothing
is computed from networks here, and no code that a run names is imported.
"""

import dataclasses
import glob
import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import pandas as pd

from tread_zoo.config import ASIDE, RunConfig

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
NAMED = ("backbone", "routing", "data")  # columns of every table, whether they differ or not
CURVE_COLUMNS = ("folder", "source", "metric", "step", "flops", "seconds", "value")


def find_runs(folders: Folders) -> list[Path]:
    """Return the folders of runs, each once; a pattern as in "runs/*" stands for its matches that
    hold a run, by name.

    Raises:
        ValueError: a folder that holds no run, or a pattern without any.
    """
    runs: dict[Path, None] = {}
    for folder in [folders] if isinstance(folders, str | os.PathLike) else folders:
        path = Path(folder)
        matches = [path] if path.exists() else [Path(match) for match in glob.glob(str(folder))]
        matches = sorted(match for match in matches if (match / "config.json").exists())
        if not matches:
            raise ValueError(f"{folder} holds no run: there is no config.json.")
        runs |= dict.fromkeys(matches)
    return list(runs)


def read_runs(folders: Folders, records: Sequence[Path] | None = None) -> pd.DataFrame:
    """Return a table with a row for each run.

    Columns: `folder`; `backbone`, `routing`, `data`; every other setting in which the runs differ,
    by its name on the command line (`routing.selection_rate`); `seed`; `ended`, whether it was
    scored after its last step; `steps` and `images` so far; `parameters`; `flops_per_step` (forward
    and backward, as routed, all images of an optimizer step), `flops` (of all steps so far),
    `flops_of_dense` (per image, routed over dense), `flops_per_sample`; `seconds` of training
    steps; `images_per_s`; `peak_memory_bytes`; `machine`; `loss`, the last that was logged;
    `protocol`, what made the scores; `samples`, the last picture; the scores by name,
    `held_out_loss` among them; `real_…`, what real images score. What was not measured is NaN or
    None. `attrs["settings"]` and `attrs["metrics"]` list the columns that are settings and scores.

    Args:
        folders: of runs: one, several, or patterns as in "runs/*".
        records: files of scores, one for each folder, in place of the runs' own `score.json`.

    Raises:
        ValueError: a folder that holds no run.
    """
    paths = find_runs(folders) if records is None else [Path(f) for f in _listed(folders)]
    files = list(records) if records is not None else [path / "score.json" for path in paths]
    settings = [_flat(json.loads((path / "config.json").read_text())) for path in paths]
    fields = [*NAMED, *differing(settings)]
    rows = [
        {"folder": str(path), **_choices(own, fields), **_row(path, own, file)}
        for path, own, file in zip(paths, settings, files, strict=True)
    ]
    table = pd.DataFrame(rows)
    first = table.columns.get_loc("samples") + 1 if rows else 0
    real = [name for name in table if str(name).startswith("real_")]
    table.attrs["settings"] = fields
    table.attrs["metrics"] = [name for name in table.columns[first:] if name not in real]
    return table


def read_curves(folders: Folders) -> pd.DataFrame:
    """Return a long table of all that was measured on the way.

    Columns: `folder`, `source` ("log" for metrics.jsonl, "score" for scores.jsonl), `metric`,
    `step`, `flops` and `seconds` of training until then (at the run's mean rate), `value`. The
    held-out loss of the log is of a single draw of times and noises, that of the scores of several:
    they are two curves.

    Args:
        folders: as of `read_runs`.

    Raises:
        ValueError: a folder that holds no run.
    """
    tables = []
    for path in find_runs(folders):
        own = _flat(json.loads((path / "config.json").read_text()))
        row = _row(path, own, path / "score.json")
        points = [
            (source, metric, line.get("step", line.get("protocol", {}).get("step")), value)
            for source, file in (("log", "metrics.jsonl"), ("score", "scores.jsonl"))
            for line in _lines(path / file)
            for metric, value in _values(line).items()
        ]
        table = pd.DataFrame(points, columns=["source", "metric", "step", "value"])
        table.insert(0, "folder", str(path))
        table["flops"] = table.step * row["flops_per_step"]
        table["seconds"] = table.step * (row["seconds"] / max(1, row["steps"]))
        tables.append(table[list(CURVE_COLUMNS)])
    return pd.concat(tables, ignore_index=True)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields, beside seed and those of `NAMED`, in which two runs differ that chose the
    same part; what one backbone has and another has not is said by their names."""
    values: dict[str, dict[Any, set[str]]] = {}
    for own in settings:
        for field, value in own.items():
            part = own.get(field.rpartition(".")[0])
            values.setdefault(field, {}).setdefault(part, set()).add(repr(value))
    outside = {*NAMED, "seed", *_aside(RunConfig)}
    return [
        field
        for field, by_part in values.items()
        if any(len(of_part) > 1 for of_part in by_part.values())
        and field not in outside
        and field.partition(".")[0] not in outside - set(NAMED)
    ]


def _listed(folders: Folders) -> list[str | os.PathLike[str]]:
    return [folders] if isinstance(folders, str | os.PathLike) else list(folders)


def _choices(settings: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return a run's values of `fields`; those of routes are None where there are none."""
    dense = settings["routing"] == "none"
    return {f: None if dense and f.startswith("routing.") else settings.get(f) for f in fields}


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by their names on the command line; a part's name under its field itself."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key == "name" and prefix:
            flat[prefix.rstrip(".")] = value
        elif isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value) if isinstance(value, list) else value
    return flat


def _aside(cls: Any, prefix: str = "") -> Iterator[str]:
    """Yield the fields of a configuration that do not change what a run computes."""
    hints = get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if ASIDE in getattr(hint, "__metadata__", ()):
            yield prefix + field.name
        elif dataclasses.is_dataclass(hint):
            yield from _aside(hint, f"{prefix}{field.name}.")


def _row(folder: Path, settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    record = json.loads(file.read_text()) if file.exists() else {}
    facts_file = folder / "facts.json"
    facts = json.loads(facts_file.read_text()) if facts_file.exists() else {}
    run, protocol = record.get("run", {}), record.get("protocol")
    if protocol is not None:
        protocol = {**protocol, "held_out": record.get("held_out")}
    log = list(_lines(folder / "metrics.jsonl"))
    last: dict[str, Any] = {}
    for line in log:
        last |= line
    steps = settings["training.num_steps"] if record else last.get("step", 0)
    batch = settings["training.batch_size"] * settings["training.gradient_accumulation_steps"]
    batch *= run.get("num_processes", 1)
    speeds = [line["images_per_s"] for line in log if "images_per_s" in line]
    speed = statistics.median(speeds) if speeds else math.nan
    pictures = sorted((folder / "samples").glob("step_*.png"))
    routed, dense = (facts.get(key, math.nan) for key in ("flops_routed", "flops_dense"))
    return {
        "seed": settings["seed"],
        "ended": bool(record),
        "steps": steps,
        "images": steps * batch,
        "parameters": facts.get("num_parameters", math.nan),
        "flops_per_step": routed * batch,
        "flops": routed * batch * steps,
        "flops_of_dense": routed / dense,
        "flops_per_sample": (protocol or {}).get("flops_per_image") or math.nan,
        "seconds": run.get("seconds", {}).get("training", steps * batch / speed),
        "images_per_s": speed,
        "peak_memory_bytes": run.get("peak_memory_bytes", math.nan),
        "machine": _machine(run) if run else None,
        "loss": last.get("loss", math.nan),
        "protocol": protocol,
        "samples": str(pictures[-1]) if pictures else None,
        **({"held_out_loss": last["held_out_loss"]} if "held_out_loss" in last else {}),
        **record.get("values", {}),
        **{f"real_{name}": value for name, value in record.get("real", {}).items()},
    }


def _machine(run: Mapping[str, Any]) -> str:
    processes = run.get("num_processes", 1)
    parts = [f"{processes} processes"] if processes > 1 else []
    parts += [str(run[key]) for key in ("device", "precision") if key in run]
    return ", ".join([*parts, f"torch {run.get('torch')}"])


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines; the last may be half written, by a run that goes
    on."""
    for text in file.read_text().splitlines() if file.exists() else ():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def _values(line: Mapping[str, Any]) -> dict[str, float]:
    values = line.get("values", line)
    return {
        name: float(value)
        for name, value in values.items()
        if name != "step" and isinstance(value, int | float)
    }
