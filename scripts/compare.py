"""Train grids of settings, and put their numbers on one page.

tread-zoo compare                                       # the study named architectures
tread-zoo compare backbone=dit_tiny,mamba_tiny routing=none,tread seed=0,1,2
tread-zoo compare compare.study=selectors backbone=mamba_tiny     # studies are in configs/study/
tread-zoo compare compare.jobs=2 training.score_every=100 compare.out=comparisons/faces
tread-zoo compare compare.runs=[runs/a,runs/b] compare.out=comparisons/mine
tread-zoo compare compare.runs="runs/digits_*" compare.metric=kid
tread-zoo compare compare.runs="runs/dit_*" 'guidance=none,{name: cfg, scale: 2}' \\
    sampler.num_steps=10,20,40 compare.out=comparisons/guidance         # scores, without training
tread-zoo compare compare.runs=runs/x sampler.selection_rate=0,0.25,0.5,0.75  # cheaper sampling
tread-zoo compare compare.runs="runs/dit_*" weights=ema:0.03,ema:0.05,ema:0.1

Every override of tread-zoo train works. An override with several values (hydra's sweep syntax)
replaces the study's values of that field, or adds a dimension to its grids. Each combination, a
cell, runs in its own process. The same command again continues where it stopped: finished cells are
read, not repeated.

The exit status is 0 if all cells ended well, 1 if one failed, and 2 after an error.
"""

import itertools
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.checkpoint_config import EvaluateConfig
from tread_zoo.cli import (
    SCRIPTS,
    check_words,
    compose_settings,
    errors_in_one_line,
    import_plugins,
    plain_errors,
    plugins_among,
    presets,
    quoted,
    readable,
)
from tread_zoo.config import RunConfig, file_name, make_config
from tread_zoo.fields import OPTIONS, check
from tread_zoo.help import describe

if TYPE_CHECKING:
    import pandas as pd

    from tread_zoo import comparison

TRAIN, EVALUATE = SCRIPTS / "train.py", SCRIPTS / "evaluate.py"
PREFIX = "compare."  # of settings of the comparison itself


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class CompareConfig:
    """Settings of `tread-zoo compare`, which trains and compares the runs of a study, or compares
    existing `runs`. `compare.study=NAME` takes the study's settings from configs/study/NAME.yaml.

    Args:
        out: folder of the report and the runs: index.html, report.md, results.csv, runs/ and more.
        title: title of the page; null takes the study's.
        grids: grids of a study; each has a list of values for each of its fields, and all
            combinations of them are run.
        fixed: overrides for all runs of a study, unless the command line changes them.
        jobs: number of processes at a time; with several GPUs, each process takes one.
        metric: the score by which the page judges; null takes the first one that all runs have,
            a distance (lower is better) if there is one.
        runs: existing runs: a folder, a pattern such as "runs/*", or a list. Other words of
            the command line are then overrides of `tread-zoo evaluate`; null trains a study.
    """

    out: str = "comparisons/digits"
    title: str | None = None
    grids: tuple[dict[str, list[Any]], ...] = ()
    fixed: tuple[str, ...] = ()
    jobs: PositiveInt = 1
    metric: str | None = None
    runs: str | tuple[str, ...] | None = None


def main() -> None:
    words = sys.argv[1:]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # it is ignored under nohup
        signal.signal(signal.SIGHUP, hang_up)
    stopped = "stopped; the same command continues"
    with errors_in_one_line(stopped=stopped, status=2), plain_errors("compare", RunConfig):
        if {"-h", "--help"} & set(words):
            about = presets("compare", CompareConfig)
            print(describe(__doc__, CompareConfig, words, about, PREFIX))
            return
        status = compare(words)
    sys.exit(status)


def hang_up(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGHUP: stop as on Ctrl-C. A closing terminal sends it twice; ignore the second."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def compare(words: Sequence[str]) -> int:
    """Run the cells (combinations of settings) that have no result yet, and write a report on all
    that have one. Existing `runs` without overrides are only reported. `words` are the command's
    arguments. Return 1 if a cell failed, else 0."""
    check_words(words, RunConfig)
    settings = read_settings([word for word in words if word.startswith(PREFIX)])
    overrides = [readable(word) for word in words if not word.startswith(PREFIX)]
    from tread_zoo import comparison  # with torch, pandas and scipy, which take seconds

    existing, out, failed = settings["runs"] is not None, Path(settings["out"]), dict[str, str]()
    scored = existing and any(not word.startswith("plugins=") for word in overrides)
    if existing and not scored:
        import_plugins(plugins_among(words))  # for their metrics
        runs = comparison.read_runs(settings["runs"])
    else:
        cells = make_cells(settings, overrides)
        if scored:
            forget_older(cells)
        comparison.check_same_commands(cells, out)
        failed = comparison.run_cells(cells, jobs=settings["jobs"], devices=visible_devices())
        for name, reason in failed.items():
            print(f"failed: {name}: {reason}", file=sys.stderr)
        runs = read_cells([cell for cell in cells if cell.result.exists()])
    curves = comparison.read_curves(dict.fromkeys(runs.folder))
    if scored:  # scores during training follow the runs' own protocol
        curves = curves[curves.source == "log"]
    about = {
        "title": settings["title"] or "Runs compared",
        "command": shlex.join(["tread-zoo", "compare", *words]),
        "metric": settings["metric"],
    }
    print(comparison.write_report(runs, curves, out, **about, failed=failed))
    print(f"written to {out}: index.html, report.md, figures/, results.csv, curves.csv")
    return int(bool(failed))


def read_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the comparison as {field of `CompareConfig`: value}. `words` are the
    overrides on the command line that begin with `compare.`."""
    texts = [word.removeprefix(PREFIX) for word in words]
    given = compose_settings("compare", texts, CompareConfig)
    settings = asdict(check(CompareConfig, given, "compare"))
    if settings["runs"] is not None and not any(text.startswith("title=") for text in texts):
        settings["title"] = None  # the study's title is for other runs
    return settings


def make_cells(settings: dict[str, Any], overrides: Sequence[str]) -> "list[comparison.Cell]":
    """Return the cells, one process each: a cell trains one run or, if the setting `runs` is given,
    scores one. All values in `overrides` and in the study's grids are checked, but not all
    combinations. `settings` are from `read_settings`."""
    from tread_zoo import comparison

    out, scored = Path(settings["out"]), settings["runs"] is not None
    runs = comparison.find_runs(settings["runs"]) if scored else [None]
    grids, shared = ([{}], []) if scored else (settings["grids"], settings["fixed"])
    cells, checked = list[comparison.Cell](), set[tuple[str, str]]()
    for run, (choices, texts) in itertools.product(
        runs, comparison.expand(*split_sweeps(grids, overrides, shared))
    ):
        choices = choices if run is None else {"run": str(run), **choices}
        name = file_name(choices)
        if run is None:
            script, result = TRAIN, out / "runs" / name / "score.json"
            texts = [*texts, f"run_dir={quoted(result.parent)}", "resume=auto"]
        else:
            script, result = EVALUATE, out / "scores" / f"{name}.json"
            texts = [*texts, f"checkpoint={quoted(run)}", f"out={quoted(result)}"]
        if not checked or not choices.items() <= checked:  # each value once, not all combinations
            checked |= choices.items()
            if scored:
                check(EvaluateConfig, compose_settings("evaluate", texts, EvaluateConfig))
            else:
                make_config(**compose_settings("train", texts))
        command = (sys.executable, str(script), *texts)
        cells.append(comparison.Cell(name, choices, command, result, out / "logs" / f"{name}.log"))
    return cells


def forget_older(cells: "Sequence[comparison.Cell]") -> None:
    """Delete the scores of existing runs that were trained again after they were scored."""
    for cell in cells:
        saved = Path(cell.choices["run"], "checkpoints").glob("step_*/checkpoint.json")
        newest = max((file.stat().st_mtime for file in saved), default=0.0)
        if cell.result.exists() and cell.result.stat().st_mtime < newest:
            cell.result.unlink()


def read_cells(cells: "Sequence[comparison.Cell]") -> "pd.DataFrame":
    """Return a table with a row for each of `cells`, which have all written their results; see
    `read_runs` for its columns. If the cells scored existing runs, each swept field is a column,
    too, and columns have the values of the cells' overrides. Raises ValueError if there are no
    cells."""
    from tread_zoo import comparison

    if not cells:
        raise ValueError("No cell ended well: there is nothing to compare.")
    if "run" not in cells[0].choices:
        return comparison.read_runs([cell.result.parent for cell in cells])
    runs = comparison.read_runs(
        [cell.choices["run"] for cell in cells], [cell.result for cell in cells]
    )
    given = [dict(text.partition("=")[::2] for text in cell.command[2:]) for cell in cells]
    fields, swept = runs.attrs["settings"], dict.fromkeys(f for cell in cells for f in cell.choices)
    runs.attrs["settings"] = [*dict.fromkeys([*fields, *(f for f in swept if f != "run")])]
    for field in runs.attrs["settings"]:
        if field in swept or field in given[0]:
            runs[field] = [overrides.get(field) for overrides in given]
    return runs


def split_sweeps(
    grids: Sequence[dict[str, list[Any]]], overrides: Sequence[str], shared: Sequence[str] = ()
) -> tuple[list[dict[str, list[str]]], list[str]]:
    """Return {field: values to sweep} for each grid, and a list of overrides for all runs.

    Args:
        grids: a study's grids, {field: values}.
        overrides: overrides of the command line. They replace the values in grids that have the
            field. Several values of a field that no grid has are added to every grid.
        shared: the study's own overrides, used unless `overrides` has one of the same field.
    """
    sweeps = [{f: [str(v) for v in values] for f, values in grid.items()} for grid in grids]
    parser = OverridesParser.create()
    parsed = dict(zip(overrides, parser.parse_overrides(list(overrides)), strict=True))
    overridden = {override.key_or_group for override in parsed.values()}
    fixed = [text for text in shared if text.partition("=")[0].lstrip("+~") not in overridden]
    for text, override in parsed.items():
        field, is_sweep = str(override.key_or_group), override.is_sweep_override()
        values = [text.partition("=")[2]]
        if is_sweep:  # hydra escapes more than needed, as in ema\\:0.05
            values = [value.replace("\\:", ":") for value in override.sweep_string_iterator()]
        having = [grid for grid in sweeps if field in grid]
        for grid in having or (sweeps if is_sweep else []):
            grid[field] = values
        if not having and not is_sweep:
            fixed.append(text)
    return sweeps, fixed


def visible_devices() -> list[str]:
    """Return the CUDA devices that cells share, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


if __name__ == "__main__":
    main()
