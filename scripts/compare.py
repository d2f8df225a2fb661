"""Train grids of settings, and put their numbers on one page.

tread-zoo compare                                       # the study architectures
tread-zoo compare backbone=dit_tiny,mamba_tiny routing=none,tread seed=0,1,2
tread-zoo compare compare.study=selectors backbone=mamba_tiny     # configs/study/ has them
tread-zoo compare compare.jobs=2 training.score_every=100 compare.out=comparisons/faces
tread-zoo compare compare.runs=[runs/a,runs/b] compare.out=comparisons/mine
tread-zoo compare compare.runs="runs/digits_*" compare.metric=kid compare.goal=1.5
tread-zoo compare compare.runs="runs/dit_*" 'guidance=none,{name: cfg, scale: 2}' \
    sampler.num_steps=10,20,40 compare.out=comparisons/guidance           # cells score, not train
tread-zoo compare compare.runs=runs/x sampler.selection_rate=0,0.25,0.5,0.75    # budgets
tread-zoo compare compare.runs="runs/dit_*" weights=ema:0.03,ema:0.05,ema:0.1
tread-zoo compare compare.to=reference compare.runs=[runs/mine]   # docs/recipes.md
tread-zoo compare compare.curve=mine.csv compare.runs="runs/mine_seed*"

Every override of tread-zoo train works. One with several values (hydra's sweep syntax) replaces the
study's values for that field, or adds a dimension to its grids. Each cell is a process. The same
command again continues where it stopped: finished cells are read, not repeated.

compare.to=reference reports for each run whether it is on the curve of its recipe, as far as it
got. The exit status is 0 if all are (or all cells ended well), 1 if not, and 2 after an error.
"""

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import pandas as pd
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from tread_zoo.cli import (
    CONFIGS,
    SCRIPTS,
    check_words,
    compose_settings,
    errors_in_one_line,
    presets,
    quoted,
    readable,
)
from tread_zoo.comparison import (
    Cell,
    check_same_commands,
    compare_with_curve,
    describe_comparison,
    expand,
    find_runs,
    make_curve,
    read_curves,
    read_runs,
    run_cells,
    write_report,
)
from tread_zoo.config import RunConfig, file_name, make_config
from tread_zoo.errors import unknown_name
from tread_zoo.evaluation.evaluate import EvaluateConfig
from tread_zoo.fields import OPTIONS, check, default_fields
from tread_zoo.help import describe

CURVES = CONFIGS / "experiment" / "curves"
TRAIN, EVALUATE = SCRIPTS / "train.py", SCRIPTS / "evaluate.py"
OWN = "compare."


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class CompareConfig:
    """What tread-zoo compare compares; compare.study=… is one of configs/study/.

    Args:
        out: folder of index.html, report.md, quality.png, figures/, results.csv, curves.csv, runs/.
        title: of the page; null is the study's.
        grids: of a study; each is swept on its own: values by field.
        fixed: of a study: overrides that all cells share; those of the command line take their
            place.
        jobs: processes at a time; with several GPUs each takes its own.
        metric: the score that decides on the page; null: the first distance that all runs have.
        goal: a value of `metric`: the report says what each setting spent until it met it; needs
            training.score_every.
        runs: existing runs: a folder, a pattern such as "runs/*", or a list; overrides are then
            those of tread-zoo evaluate.
        to: reference: each of `runs` against its recipe's curve; reference.md goes to its folder,
            or to `out`.
        recipe: for to=reference: a curve of configs/experiment/curves; null takes that of the run's
            data, backbone and routing.
        curve: a file: write the curve of `runs`, seeds of one recipe, to it.
    """

    out: str = "comparisons/digits"
    title: str | None = None
    grids: tuple[dict[str, list[Any]], ...] = ()
    fixed: tuple[str, ...] = ()
    jobs: PositiveInt = 1
    metric: str | None = None
    goal: float | None = None
    runs: str | tuple[str, ...] = ()
    to: Literal["reference"] | None = None
    recipe: str | None = None
    curve: str | None = None


def main() -> None:
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(describe(__doc__, CompareConfig, words, presets("compare", CompareConfig), OWN))
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, hang_up)
    with errors_in_one_line(stopped="stopped; the same command continues", status=2):
        status = run(words)
    sys.exit(status)


def hang_up(number: int, frame: FrameType | None) -> NoReturn:
    """Stop as on Ctrl-C, once: a terminal that is closed sends it, and then its shell once more."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(arguments: Sequence[str]) -> int:
    """Do what the command line says, and return the exit status."""
    check_words(arguments, RunConfig)
    settings = read_settings([text for text in arguments if text.startswith(OWN)])
    overrides = [readable(text) for text in arguments if not text.startswith(OWN)]
    if settings["to"] or settings["curve"]:
        if overrides or not settings["runs"]:
            raise ValueError("compare.to and compare.curve take compare.runs and no overrides.")
        return to_reference(settings) if settings["to"] else write_curve(settings)
    return compare(settings, overrides, shlex.join(["tread-zoo", "compare", *arguments]))


def read_settings(own: Sequence[str]) -> dict[str, Any]:
    """Return the comparison's settings, from overrides that begin with `compare.`."""
    texts = [text.removeprefix(OWN) for text in own]
    given = compose_settings("compare", texts, CompareConfig)
    settings = asdict(check(CompareConfig, given, "compare"))
    if settings["runs"] and not any(text.startswith("title=") for text in texts):
        settings["title"] = None  # the study's is of others
    return settings


def compare(settings: dict[str, Any], overrides: Sequence[str], command: str) -> int:
    """Run what is not there yet, write the report, and return 1 if a cell failed."""
    out, failed = Path(settings["out"]), dict[str, str]()
    if settings["runs"] and not overrides:
        runs = read_runs(settings["runs"])
    else:
        cells = make_cells(settings, overrides)
        check_same_commands(cells, out)
        failed = run_cells(cells, jobs=settings["jobs"], devices=visible_devices())
        for name, reason in failed.items():
            print(f"failed: {name}: {reason}", file=sys.stderr)
        ended = [cell for cell in cells if cell.result.exists()]
        if not ended:
            raise ValueError("No cell ended well: there is nothing to compare.")
        if settings["runs"]:
            runs = read_runs([c.choices["run"] for c in ended], [c.result for c in ended])
            for field in dict.fromkeys(field for cell in ended for field in cell.choices):
                if field != "run":
                    runs[field] = [cell.choices.get(field) for cell in ended]
                    runs.attrs["settings"] = [*dict.fromkeys([*runs.attrs["settings"], field])]
        else:
            runs = read_runs([cell.result.parent for cell in ended])
    curves = read_curves(dict.fromkeys(runs.folder))
    if settings["runs"] and overrides:  # the scores on the way were by the runs' own protocol
        curves = curves[curves.source == "log"]
    about = {"title": settings["title"] or "Runs compared", "command": command}
    about |= {key: settings[key] for key in ("metric", "goal")}
    print(write_report(runs, curves, out, **about, failed=failed))
    print(f"written to {out}: index.html, report.md, figures/, results.csv, curves.csv")
    return int(bool(failed))


def make_cells(settings: dict[str, Any], overrides: Sequence[str]) -> list[Any]:
    """Return the cells: training of every combination, or with `runs` scoring of each of them."""
    out, runs = Path(settings["out"]), settings["runs"]
    grids, shared = ([{}], []) if runs else (settings["grids"], settings["fixed"])
    cells = []
    for run in find_runs(runs) if runs else [None]:
        for choices, texts in expand(*split_sweeps(grids, overrides, shared)):
            choices = choices if run is None else {"run": str(run), **choices}
            name = file_name(choices)
            if run is None:
                script, result = TRAIN, out / "runs" / name / "score.json"
                own = [f"run_dir={quoted(result.parent)}", "resume=auto"]
            else:
                script, result = EVALUATE, out / "scores" / f"{name}.json"
                own = [f"checkpoint={quoted(run)}", f"out={quoted(result)}"]
            command = (sys.executable, str(script), *texts, *own)
            cells.append(Cell(name, choices, command, result, out / "logs" / f"{name}.log"))
    checked: set[tuple[str, str]] = set()
    for cell in cells:  # before any runs: each value once, not each with every other
        if not checked or not cell.choices.items() <= checked:
            checked |= cell.choices.items()
            check_cell(cell, scores=bool(runs))
    return cells


def check_cell(cell: Cell, *, scores: bool) -> None:
    """Check the settings of a cell, which trains or scores. Raises ValueError if they are wrong."""
    if scores:
        given = compose_settings("evaluate", cell.command[2:], EvaluateConfig)
        check(EvaluateConfig, given)
    else:
        make_config(**compose_settings("train", cell.command[2:]))


def split_sweeps(
    grids: Sequence[dict[str, list[Any]]], overrides: Sequence[str], shared: Sequence[str] = ()
) -> tuple[list[dict[str, list[str]]], list[str]]:
    """Return the swept values by field of each grid, and the other overrides.

    Values from `overrides` replace those of every grid that has the field, and of `shared`, what
    all cells of a study have. A sweep over a field that no grid has spans all of them.
    """
    sweeps = [{f: [str(v) for v in values] for f, values in grid.items()} for grid in grids]
    parser = OverridesParser.create()
    parsed = dict(zip(overrides, parser.parse_overrides(list(overrides)), strict=True))
    overridden = {override.get_key_element() for override in parsed.values()}
    fixed = [text for text in shared if text.partition("=")[0].lstrip("+~") not in overridden]
    for text, override in parsed.items():
        field = override.get_key_element()
        spans = override.is_sweep_override()
        values = [text.partition("=")[2]]
        if spans:  # hydra escapes what it need not, as in ema\:0.05
            values = [value.replace("\\:", ":") for value in override.sweep_string_iterator()]
        having = [grid for grid in sweeps if field in grid]
        for grid in having or (sweeps if spans else []):
            grid[field] = values
        if not having and not spans:
            fixed.append(text)
    return sweeps, fixed


def to_reference(settings: dict[str, Any]) -> int:
    """Compare runs with the curves of their recipes, and return 1 if one is off its curve."""
    status, own_out = 0, default_fields(CompareConfig)["out"]
    recipes = [path.stem for path in CURVES.glob("*.csv")]
    for folder in find_runs(settings["runs"]):
        config = json.loads((folder / "config.json").read_text())
        kind = "dense" if config["routing"]["name"] == "none" else "tread"
        name = f"{config['data']['name']}_{config['backbone']['name']}_"
        own = [r for r in recipes if r.endswith(kind) and name.startswith(r.removesuffix(kind))]
        recipe = settings["recipe"] or (own or [name + kind])[0]
        if recipe not in recipes:
            raise unknown_name(f"{folder}: compare.recipe", recipe, recipes)
        different = recipe_differences(recipe, config)
        curve = pd.read_csv(CURVES / f"{recipe}.csv", comment="#")
        verdicts = compare_with_curve(folder, curve, different)
        lines = [f"{name}={value} (recipe: {other})" for name, (value, other) in different.items()]
        text = describe_comparison(folder.name, recipe, verdicts, lines)
        place = folder if settings["out"] == own_out else Path(settings["out"]) / folder.name
        place.mkdir(parents=True, exist_ok=True)
        (place / "reference.md").write_text(text)
        print(f"{text}\nwritten to {place / 'reference.md'}")
        status |= int(not verdicts.on.all())
    return status


def recipe_differences(recipe: str, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return in what a run differs from its recipe, seed and data source apart:
    {field: (of the run, of the recipe)}."""
    rest, _, kind = recipe.rpartition("_")
    experiments = (path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
    experiment = next(name for name in experiments if rest.startswith(f"{name}_"))
    backbone = rest.removeprefix(f"{experiment}_")
    routing = "none" if kind == "dense" else "tread"
    overrides = [f"experiment={experiment}", f"backbone={backbone}_tiny", f"routing={routing}"]
    wanted = make_config(**compose_settings("train", overrides))
    different = make_config(**{**config, "tracker": "local"}).differences(wanted)
    return {f: v for f, v in different.items() if f != "seed" and not f.startswith("data")}


def write_curve(settings: dict[str, Any]) -> int:
    """Write the curve of runs, its first line their folders."""
    folders = find_runs(settings["runs"])
    text = make_curve(folders).to_csv(index=False, float_format="%.6g")
    Path(settings["curve"]).write_text(f"# {', '.join(map(str, folders))}\n{text}")
    print(f"written: {settings['curve']}")
    return 0


def visible_devices() -> list[str]:
    """Return the CUDA devices that cells may share out."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


if __name__ == "__main__":
    main()
