"""Runs as tables: one row per run, and their curves.

    runs = read_runs("comparisons/digits/runs/*")
    runs.groupby(["backbone", "routing"]).fid.agg(["mean", "std", "count"])
    curves = read_curves(runs.folder)
    curves.query("metric == 'held_out_loss'").pivot(index="step", columns="folder", values="value")

The tables come from files in a run's folder: `config.json`, `facts.json` (data, size, FLOPs),
`metrics.jsonl` and, once the run was scored, `scores.jsonl` and `score.json`.
"""

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from tread_zoo.config import auto_warmup_steps, bookkeeping_fields, flatten
from tread_zoo.evaluation.contribution import contribution_names
from tread_zoo.evaluation.protocol import Protocol
from tread_zoo.runs.old_routing import with_new_names
from tread_zoo.training.trackers import read_lines

Folders = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
FORMULA = re.compile(r"'*[=+\-@\t\r]")  # starts of spreadsheet formulas; `'` marks text
STEPS, NUM_FLOPS = "training.num_steps", "training.num_flops"
WARMUP = "lr_schedule.warmup_steps"
NAMED = ("backbone", "routing", "data")  # columns of every table, even if all runs agree


def find_runs(folders: Folders) -> list[Path]:
    """Return the folders of runs, without duplicates. A pattern such as "runs/*" stands for its
    matches that contain a run. Raises ValueError if a folder or pattern has none."""
    runs: dict[Path, None] = {}
    for folder in [folders] if isinstance(folders, str | os.PathLike) else folders:
        path = Path(folder)
        matches = [path] if path.exists() else map(Path, glob.glob(str(folder)))
        holding = sorted(match for match in matches if (match / "config.json").exists())
        if not holding:
            raise ValueError(f"{folder} holds no run: there is no config.json.")
        runs |= dict.fromkeys(holding)
    return list(runs)


def read_runs(folders: Folders, records: Sequence[Path] | None = None) -> pd.DataFrame:
    """Return a table with a row per run, finished or not. docs/evaluation.md lists main columns.

    Settings in which runs differ are columns with command-line names such as
    `routing.selection_rate`. `real_fid` is the score of real images; `contribution_3` belongs to
    block 3, `contribution_2_8` to blocks 2 … 7 (`tread_zoo.evaluation.contribution`). Missing
    values are NaN or None. `attrs["settings"]` and `attrs["metrics"]` list settings and scores.

    Args:
        folders: folders of runs: one, several, or patterns such as "runs/*".
        records: for each of `folders`, a file of scores to read instead of `score.json`; patterns
            are not allowed then.

    Raises:
        ValueError: a folder contains no run.
    """
    paths = find_runs(folders) if records is None else [Path(f) for f in folders]  # type: ignore[union-attr]
    files = [path / "score.json" for path in paths] if records is None else records
    settings = [_settings(path) for path in paths]
    fields = [*NAMED, *differing(settings)]
    rows = [
        {"folder": str(path), **_choices(values, fields), **_row(path, values, file)}
        for path, values, file in zip(paths, settings, files, strict=True)
    ]
    table = pd.DataFrame(rows)
    fields = _name_budgets(table, settings, fields)
    scores = list(table.columns[table.columns.get_loc("samples") + 1 :])
    table.attrs["settings"] = fields
    special = ("real_", "contribution_")
    table.attrs["metrics"] = [name for name in scores if not name.startswith(special)]
    return table


def read_curves(folders: Folders) -> pd.DataFrame:
    """Return a table of all that was measured during training, with a row for each value.

    Columns: `folder`, `source` ("log" for metrics.jsonl, "score" for scores.jsonl), `metric`,
    `step`, `value`, and the `flops` and `seconds` of training up to that step (seconds at the run's
    mean rate). The held-out loss in the log uses one noise per image, in the scores several.
    `held_out_loss_1` to `_4` are its means over quarters of rising noise level.

    For `folders` see `read_runs`.
    """
    points = []
    for path in find_runs(folders):
        row = _row(path, _settings(path), path / "score.json")
        facts = _read(path / "facts.json")
        second = row["seconds"] / max(1, row["steps"])
        for source, file in (("log", "metrics.jsonl"), ("score", "scores.jsonl")):
            lines = list(read_lines(path / file))
            if source == "score" and lines:  # those under the protocol of the newest
                newest = Protocol.of(lines[-1])
                lines = [each for each in lines if Protocol.of(each) == newest]
            for line in lines:
                step = line["step"] if source == "log" else line["protocol"]["step"]
                at = {"step": step, "flops": flops_until(step, facts), "seconds": step * second}
                fourths = enumerate(line.get("held_out_loss_by_level", ()), 1)
                levels = {f"held_out_loss_{i}": loss for i, loss in fourths}
                worth = contribution_names(line.get("contributions", {}))
                for metric, value in {**line.get("values", line), **levels, **worth}.items():
                    if metric != "step":
                        what = {"folder": str(path), "source": source, "metric": metric}
                        points.append({**what, **at, "value": float(value)})
    columns = ["folder", "source", "metric", "step", "flops", "seconds", "value"]
    return pd.DataFrame(points, columns=columns)


def write_table(table: pd.DataFrame, file: Path) -> None:
    """Write a table as CSV. Texts that a spreadsheet would take for formulas get a `'` in front."""

    def quote(value: Any) -> Any:
        if not isinstance(value, str) or not FORMULA.match(value) or _is_number(value):
            return value
        return f"'{value}"

    columns = {
        quote(name): column if pd.api.types.is_numeric_dtype(column) else column.map(quote)
        for name, column in table.items()
    }
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "backslashreplace"}
    pd.DataFrame(columns).to_csv(file, index=False, **options)


def read_table(file: str | Path) -> pd.DataFrame:
    """Return a table that `write_table` wrote, such as results.csv. Only empty cells become missing
    values; the text `None` stays a text."""

    def unquote(value: Any) -> Any:
        return re.sub(f"^'(?={FORMULA.pattern})", "", value) if isinstance(value, str) else value

    table = pd.read_csv(file, encoding="utf-8", keep_default_na=False, na_values=[""])
    return table.rename(columns=unquote).map(unquote)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the fields in which the `settings` of any two runs differ, except the seed, fields in
    `NAMED`, and fields that do not change what a run computes. An option such as `backbone.depth`
    is compared only among runs with the same `backbone`."""
    values: dict[str, dict[Any, set[str]]] = {}
    for run in settings:
        for field, value in run.items():
            part = run.get(field.rpartition(".")[0])
            values.setdefault(field, {}).setdefault(part, set()).add(repr(value))
    ignored = {"seed", *bookkeeping_fields()}
    return [
        field
        for field, by_part in values.items()
        if field not in NAMED and not ignored & {field, field.partition(".")[0]}
        if any(len(texts) > 1 for texts in by_part.values())
    ]


def _name_budgets(
    table: pd.DataFrame, settings: Sequence[Mapping[str, Any]], fields: list[str]
) -> list[str]:
    """Return `fields` without the number of steps if budgets of FLOPs explain it: if the runs have
    fewer different budgets, equal up to half a step of each, than numbers of steps. Several
    budgets become the setting, and a column, `training.num_flops`. `table` has a row for each
    run."""
    steps = [int(run[STEPS]) for run in settings]
    facts = [_read(Path(folder) / "facts.json") for folder in table.folder]
    planned = list(map(flops_until, steps, facts))
    order, each = np.argsort(planned), table.flops_per_step
    budgets, first = [math.nan] * len(steps), order[0]
    for i in order:
        if not planned[i] - planned[first] <= (each[i] + each[first]) / 2:
            first = i
        budgets[i] = float(f"{planned[first]:.3g}")
    if len(set(budgets)) >= len(set(steps)):
        return fields
    follow = {STEPS}
    if [run.get(WARMUP) for run in settings] == list(map(auto_warmup_steps, steps)):
        follow.add(WARMUP)
    fields = [field for field in fields if field not in follow]
    if len(set(budgets)) > 1:
        table.insert(table.columns.get_loc("seed"), NUM_FLOPS, budgets)
        fields.append(NUM_FLOPS)
    return fields


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in `folder`, by their command-line names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    flat = flatten(with_new_names(config))
    return {
        field.removesuffix(".name"): str(value) if isinstance(value, list) else value
        for field, value in flat.items()
    }


def _choices(settings: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return by field the values of `fields` in a run's `settings`. Routing options are None for
    `routing=none`."""
    dense = settings["routing"] == "none"
    return {f: None if dense and f.startswith("routing.") else settings.get(f) for f in fields}


def _row(folder: Path, settings: Mapping[str, Any], file: Path) -> dict[str, Any]:
    record, facts = _read(file), _read(folder / "facts.json")
    run, protocol = record.get("run", {}), record.get("protocol")
    if protocol is not None:
        protocol = {**protocol, "held_out": record.get("held_out")}
    last: dict[str, Any] = {}
    speeds = []
    for line in read_lines(folder / "metrics.jsonl"):
        last |= line
        speeds += [line["images_per_s"]] if "images_per_s" in line else []
    speed = median(speeds) if speeds else math.nan
    steps = (protocol or last).get("step", 0)
    batch = facts.get("images_per_step", math.nan)
    if (protocol or {}).get("weights", "ema") != "ema":
        last.pop("held_out_loss", None)  # the log has that of averaged weights
    pictures = sorted((folder / "samples").glob("step_*.png"))
    routed, dense = (facts.get(key, math.nan) for key in ("flops_routed", "flops_dense"))
    return {
        "seed": settings["seed"],
        "ended": bool(record),
        "steps": steps,
        "images": steps * batch,
        "num_classes": facts.get("data", {}).get("num_classes") or 0,
        "parameters": facts.get("num_parameters", math.nan),
        "flops_per_step": routed * batch,
        "flops": flops_until(steps, facts),
        "flops_of_dense": routed / dense,
        "flops_per_sample": (protocol or {}).get("flops_per_image") or math.nan,
        "seconds": run.get("seconds", {}).get("training", steps * batch / speed),
        "images_per_s": speed,
        "peak_memory_bytes": run.get("peak_memory_bytes", math.nan),
        "machine": _machine(run) if run else None,
        "loss": last.get("loss", math.nan),
        "protocol": protocol,
        **contribution_names(record.get("contributions", {})),
        "samples": str(pictures[-1]) if pictures else None,
        **({"held_out_loss": last["held_out_loss"]} if "held_out_loss" in last else {}),
        **record.get("values", {}),
        **{f"real_{name}": value for name, value in record.get("real", {}).items()},
    }


def flops_until(step: int, facts: Mapping[str, Any]) -> float:
    """Return the FLOPs of a run's first `step` steps, NaN if they were not counted. `facts` is the
    content of the run's facts.json."""
    each, before = 0.0 if "flops_by_stage" in facts else math.nan, 0
    for end, flops in facts.get("flops_by_stage", ()):
        each += max(0, min(step, end) - before) * flops
        before = end
    return each * float(facts.get("images_per_step", math.nan))


def _machine(run: Mapping[str, Any]) -> str:
    parts = [f"{run['num_processes']} processes"] if run.get("num_processes", 1) > 1 else []
    parts += [str(run[key]) for key in ("device", "precision") if key in run]
    return ", ".join([*parts, f"torch {run.get('torch')}"])


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
