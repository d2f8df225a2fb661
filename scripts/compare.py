"""Train grids of settings, and put their numbers into one table.

python scripts/compare.py                                       # the study architectures
python scripts/compare.py backbone=dit_tiny,mamba_tiny routing=none,tread seed=0,1,2
python scripts/compare.py compare.study=selectors backbone=mamba_tiny     # configs/study/ has them
python scripts/compare.py data=npz data.path=faces.npz training.num_steps=20000 \
    backbone=dit_matched_s,rwkv_matched_s compare.out=comparisons/faces
python scripts/compare.py compare.equal=flops           # or equal=seconds compare.seconds=240
python scripts/compare.py compare.runs=[runs/a,runs/b] compare.out=comparisons/mine
python scripts/compare.py compare.runs="comparisons/faces/runs/*seed=0" compare.out=comparisons/one
python scripts/compare.py compare.study=fashion_mnist data=npz data.path=fashion_mnist.npz
python scripts/compare.py compare.to=reference compare.runs=[runs/mine]       # docs/recipes.md

Every override of scripts/train.py works; one with several values (hydra's sweep syntax) takes the
place of the study's values for that field, or spans the study's grids further. The same command
again continues where it stopped: finished runs are read, not repeated. The folder compare.out then
holds index.html (one page, self-contained), plots/, report.md, results.csv, results.json and runs/.

compare.to=reference says of each run whether it lies on the curve of its recipe, as far as it got;
reference.md and reference.png go to the run's folder, or to compare.out if that is given. The exit
status is 0 if all do, 1 if one does not, and 2 after an error.
"""

import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from tread_zoo.cli import as_keywords, clear_errors, register_configs

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
CURVES = CONFIGS / "experiment" / "curves"
OWN = "compare."
TO = ("reference",)
QUOTING = (
    "\nFolders with = or a comma in their names need quotes in a list: "
    """compare.runs="['runs/seed=0','runs/seed=1']"; one, or a pattern, needs no list: """
    'compare.runs="runs/*".'
)
TO_TAKES = ("to", "recipe", "runs", "out")  # what compare.to goes with

register_configs()


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(f"{__doc__}\nDefaults:\n{(CONFIGS / 'compare.yaml').read_text()}")
        return
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    own = [quoted(text.removeprefix(OWN)) for text in sys.argv[1:] if text.startswith(OWN)]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose("compare", overrides=own)
        clear_errors(run_to_the_end)(config)
    except HydraException as error:
        quoting = any(text.startswith("runs=[") for text in own)
        leave(f"error: {error}{QUOTING if quoting else ''}", own)
    except SystemExit as left:
        if not str(left.code).startswith("error: "):
            raise
        leave(str(left.code), own)


def quoted(text: str) -> str:
    """Return a word of the command line as hydra reads it: one folder, or one pattern, of runs may
    have = and commas in its name."""
    field, _, value = text.partition("=")
    if field != "runs" or not value or value[0] in "['\"":
        return text
    return "runs='{}'".format(value.replace("'", "\\'"))


def run_to_the_end(config: DictConfig) -> None:
    """Run, and know that what was printed has been read before the exit status is decided."""
    try:
        try:
            run(config)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        sys.exit("error: what reads the output was closed before its end (broken pipe).")


def leave(error: str, own: Sequence[str]) -> NoReturn:
    """Say an error and leave: with status 2 beside compare.to, where 1 is a run off its curve."""
    print(error, file=sys.stderr)
    sys.exit(2 if any(text.startswith(("to=", "recipe=")) for text in own) else 1)


def run(config: DictConfig) -> None:
    from tread_zoo.comparison import (
        check_equal,
        check_equal_runs,
        collect,
        equalise,
        expand_all,
        find_runs,
        read_run,
        run_grid,
        write_page,
        write_report,
    )

    settings = as_keywords(config)
    given = [text for text in sys.argv[1:] if not text.startswith(OWN)]
    out, equal = Path(settings["out"]), settings["equal"]
    if settings["runs"] and given:
        raise ValueError(
            f"{given[0]}: compare.runs takes runs as they are; leave it out. (What belongs to the "
            f"comparison begins with {OWN}: {OWN}to=reference.)"
        )
    if settings["to"] is not None or settings["recipe"] is not None:
        to_reference(settings)
        return
    check_equal(equal, settings["seconds"], collected=bool(settings["runs"]))
    title = settings["title"]
    if settings["runs"]:
        cells = collect(find_runs(settings["runs"]))
        if not any(text.startswith(f"{OWN}title=") for text in sys.argv[1:]):
            title = f"{len(cells)} runs compared"  # the study's is of others
    else:
        grids, fixed = split_sweeps(settings["grids"], given, settings["fixed"])
        cells = expand_all(grids, fixed, out)
        cells = equalise(cells, compose_run, equal=equal, seconds=settings["seconds"], out=out)
        run_grid(cells, compose_run)
    if int(os.environ.get("RANK", "0")) > 0:
        return
    command = shlex.join(["python", "scripts/compare.py", *sys.argv[1:]])
    results = [read_run(cell.folder) for cell in cells]
    if settings["runs"]:
        check_equal_runs(cells, results, equal)
    about = {"title": title, "command": command, "equal": equal}
    print(write_report(cells, results, out, **about))
    write_page(cells, results, out, **about)
    print(f"written to {out}: index.html, plots/, report.md, results.csv, results.json")


def to_reference(settings: dict[str, Any]) -> None:
    """Compare each of the runs with its recipe's curve; leave with status 1 if one is off it."""
    from tread_zoo.comparison import find_runs
    from tread_zoo.comparison.reference import compare_run, load_curves, write_comparison
    from tread_zoo.errors import unknown_name

    if settings["to"] not in TO:
        raise unknown_name("compare.to", settings["to"], TO)
    own = [text.removeprefix(OWN) for text in sys.argv[1:] if text.startswith(OWN)]
    for text in own:
        if text.partition("=")[0] not in TO_TAKES:
            raise ValueError(
                f"{OWN}{text} says nothing of a run that is there: leave it out; compare.to goes "
                f"with {', '.join(OWN + name for name in TO_TAKES[1:])}."
            )
    if not settings["runs"]:
        raise ValueError("compare.to=reference needs runs: add compare.runs=[runs/mine].")
    if int(os.environ.get("RANK", "0")) > 0:
        return
    curves = load_curves(CURVES)
    folders = find_runs(settings["runs"])
    out_is_given = any(text.startswith("out=") for text in own)
    names = [folder.resolve().name for folder in folders]
    twice = next((name for name in names if names.count(name) > 1), None)
    if out_is_given and twice is not None:
        raise ValueError(
            f"compare.runs has two folders of the name {twice!r}, and their reports in compare.out "
            "would be one: leave compare.out out, or compare them one by one."
        )
    found = [compare_run(folder, curves, settings["recipe"]) for folder in folders]
    for folder, name, comparison in zip(folders, names, found, strict=True):
        place = folder
        if out_is_given:
            place = Path(settings["out"]) / (name if len(folders) > 1 else "")
        print(write_comparison(comparison, place))
        print(f"written to {place}: reference.md, reference.png")
    off = [comparison.run.folder for comparison in found if comparison.is_off]
    if off:
        sys.exit(f"off the curve: {', '.join(off)}")


def split_sweeps(
    grids: Sequence[dict[str, list[Any]]], overrides: Sequence[str], shared: Sequence[str] = ()
) -> tuple[list[dict[str, list[str]]], list[str]]:
    """Return the swept values by field of each grid, and the other overrides.

    Values from `overrides` replace those of every grid that has the field, and of `shared`, what
    all runs of a study have. A sweep over a field that no grid has spans all of them.
    """
    sweeps = [{f: [str(v) for v in values] for f, values in grid.items()} for grid in grids]
    parser = OverridesParser.create()
    parsed_overrides = parser.parse_overrides(list(overrides))
    given = {parsed.get_key_element() for parsed in parsed_overrides}
    fixed = [
        text
        for text, parsed in zip(shared, parser.parse_overrides(list(shared)), strict=True)
        if parsed.get_key_element() not in given
    ]
    for text, parsed in zip(overrides, parsed_overrides, strict=True):
        field = parsed.get_key_element()
        spans = parsed.is_sweep_override()
        values = list(parsed.sweep_string_iterator()) if spans else [text.partition("=")[2]]
        having = [grid for grid in sweeps if field in grid]
        for grid in having or (sweeps if spans else []):
            grid[field] = values
        if not having and not spans:
            fixed.append(text)
    return sweeps, fixed


def compose_run(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the keywords of `train`."""
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return as_keywords(compose("train", overrides=list(overrides)))


if __name__ == "__main__":
    main()
