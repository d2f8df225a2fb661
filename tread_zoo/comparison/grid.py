"""Grids of runs: every combination of the values given, one folder each, done once.

A run that is finished is left alone, one that was cut off continues from its newest checkpoint, so
a comparison is taken up where it stopped by giving the same command again.
"""

import glob
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tread_zoo.data.build import SOURCES, as_set
from tread_zoo.diffusion import build_sampling
from tread_zoo.training import train
from tread_zoo.training.checkpoints import CheckpointError, find_checkpoint
from tread_zoo.training.files import FAILED
from tread_zoo.training.parts import Parts, build_parts

logger = logging.getLogger(__name__)

SEED = "seed"
LONGEST_NAME = 150  # bytes of a folder's name; file systems take 255
NAMED = ("backbone", "routing")  # of these a run is first known by the name
OUTSIDE_PARTS = ("tracker", "device", "run_dir", "resume", "overwrite", "kernels")


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    choices: the swept values by field, as in {"backbone": "dit_tiny", "seed": "0"}; cells of
        different grids may have different fields.
    overrides: all that composes the run's settings.
    folder: the run's own.
    """

    choices: Mapping[str, str]
    overrides: tuple[str, ...]
    folder: Path

    @property
    def setting(self) -> str:
        """What it chose, its seed apart."""
        return ",".join(f"{f}={value}" for f, value in self.choices.items() if f != SEED)


def find_runs(given: str | Sequence[str]) -> list[Path]:
    """Return the folders that `compare.runs` names: one, or several, each a path or a pattern as in
    "runs/*", whose matches that hold a run come in the order of their names.

    Raises:
        ValueError: a pattern that no run matches.
    """
    found: list[Path] = []
    for text in [given] if isinstance(given, str) else given:
        path = Path(text)
        if path.exists() or not glob.has_magic(text):  # a folder's name may have brackets
            found.append(path)
            continue
        matches = sorted(Path(match) for match in glob.glob(text))
        runs = [match for match in matches if (match / "config.json").exists()]
        if not runs:
            raise ValueError(
                f"compare.runs: no run matches {text!r}; give the folders of runs, as in "
                'compare.runs="comparisons/digits/runs/*".'
            )
        found += [run for run in runs if run not in found]
    return found


def collect(folders: Sequence[Path]) -> list[Cell]:
    """Return the cells of runs that are there, whatever made them; what tells them apart is read
    from their settings.

    Raises:
        ValueError: a folder that holds no run, or runs that cannot be told apart.
    """
    described = [_describe(folder) for folder in folders]
    fields = list(dict.fromkeys(field for facts in described for field in facts))
    told = [f for f in fields if f in (*NAMED, SEED) or _tells_apart(f, described)]
    cells = [
        Cell({field: facts[field] for field in told if field in facts}, (), folder)
        for facts, folder in zip(described, folders, strict=True)
    ]
    for index, cell in enumerate(cells):
        twin = next((c for c in cells[:index] if c.choices == cell.choices), None)
        if twin is not None:
            raise ValueError(
                f"compare.runs: {cell.folder} has the same settings and seed as {twin.folder}; "
                "give one of them."
            )
    return cells


def _describe(folder: Path) -> dict[str, str]:
    """Return the settings of a run by field, those that have a name under it too."""
    config = folder / "config.json"
    if not config.exists():
        raise ValueError(f"compare.runs: {folder} holds no run: config.json is missing.")
    settings = json.loads(config.read_text())
    facts = {group: str(settings[group]["name"]) for group in NAMED}
    for group in (*NAMED, "objective", "training", "sampler", "guidance"):
        values = settings[group]
        for key, value in {**values, **values.get("config", {})}.items():
            if key not in ("name", "config") or group not in NAMED:
                facts[f"{group}.{key}"] = str(value)
    return {**facts, SEED: str(settings["seed"])}


def _tells_apart(field: str, described: Sequence[Mapping[str, str]]) -> bool:
    """Return whether two runs, of the same backbone or routing if it is one of its fields, have
    different values; what one architecture has and another has not is said by their names."""
    group = field.partition(".")[0]
    values: dict[str, set[str]] = {}
    for facts in described:
        if field in facts:
            values.setdefault(facts.get(group, ""), set()).add(facts[field])
    return any(len(found) > 1 for found in values.values())


def expand(sweeps: Mapping[str, Sequence[str]], fixed: Sequence[str], out: Path) -> list[Cell]:
    """Return a cell for every combination of the swept values, the last field changing fastest.

    Args:
        sweeps: values by field of `configs/train.yaml`.
        fixed: overrides that all runs share.
        out: the comparison's folder; runs go to `runs/` in it.

    Raises:
        ValueError: a field that the comparison sets itself, a field without values, or values that
            come twice.
    """
    for field in (*sweeps, *(text.partition("=")[0].lstrip("+~") for text in fixed)):
        if field in ("run_dir", "resume", "overwrite"):
            raise ValueError(f"{field} is set by the comparison; use compare.out for its folder.")
    for field, values in sweeps.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{field}={','.join(values)} must list different values.")
    cells = []
    for values in itertools.product(*sweeps.values()):
        choices = dict(zip(sweeps, values, strict=True))
        swept = tuple(f"{field}={value}" for field, value in choices.items())
        name = _folder_name(",".join(swept) or "run")
        cells.append(Cell(choices, (*fixed, *swept), out / "runs" / name))
    return cells


def _folder_name(text: str) -> str:
    """Return `text` as the name of a folder; where it cannot be one as it is, what tells it from
    others is its digest."""
    name = re.sub(r"[^\w.,=-]+", "_", text)
    if name == text and len(name.encode()) <= LONGEST_NAME:
        return name
    short = name.encode()[: LONGEST_NAME - 9].decode(errors="ignore")
    return f"{short}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def expand_all(
    grids: Sequence[Mapping[str, Sequence[str]]], fixed: Sequence[str], out: Path
) -> list[Cell]:
    """Return the cells of several grids, those of a seed together and each one once.

    The first seed of all settings comes before the second of any, so that a comparison that is cut
    off has all settings to show.

    Raises:
        ValueError: as `expand`, or there is no grid.
    """
    if not grids:
        raise ValueError(
            "compare.grids=[] has no run: choose a study, as in compare.study=architectures, or "
            "give a grid, compare.grids=[{backbone:[dit_tiny],seed:[0]}]."
        )
    cells = {cell.folder: cell for grid in grids for cell in expand(grid, fixed, out)}
    seeds = list(dict.fromkeys(cell.choices.get(SEED) for cell in cells.values()))
    return sorted(cells.values(), key=lambda cell: seeds.index(cell.choices.get(SEED)))


def run_grid(cells: Sequence[Cell], compose: Callable[[Sequence[str]], dict[str, Any]]) -> None:
    """Train what is not yet trained.

    A run whose loss diverges is noted in its folder and the others go on.

    Args:
        cells: the runs.
        compose: overrides -> keywords of `train`.

    Raises:
        ValueError: settings that cannot work, before any run starts; or a folder that holds a run
            with other settings.
    """
    todo = []
    for cell in cells:
        keywords = compose(cell.overrides)
        try:
            wanted = parts_of(keywords).settings
        except ValueError as error:
            raise ValueError(f"{cell.folder.name}: {error}") from error
        if not _is_done(cell, wanted):
            todo.append((cell, keywords))
    logger.info("%d runs, %d of them done", len(cells), len(cells) - len(todo))
    for number, (cell, keywords) in enumerate(todo, start=1):
        logger.info("--- %d of %d: %s", number, len(todo), cell.folder.name)
        keywords |= {"run_dir": str(cell.folder)} | _how_to_start(cell.folder)
        try:
            train(**keywords)
        except FloatingPointError as error:
            logger.warning("%s: %s", cell.folder.name, error)
            (cell.folder / FAILED).write_text(str(error))


def parts_of(keywords: Mapping[str, Any]) -> Parts:
    """Return the parts of a run, from the keywords of `train`."""
    return build_parts(**{key: v for key, v in keywords.items() if key not in OUTSIDE_PARTS})


def _is_done(cell: Cell, wanted: dict[str, Any]) -> bool:
    """Return whether the run has ended, with the settings that are asked for."""
    config = cell.folder / "config.json"
    if not config.exists():
        return False
    given = json.loads(config.read_text())
    if given.get("data_options", {}).get("name") in SOURCES:
        given["data_options"] = as_set(given["data_options"])
    different = sorted(
        key for key in wanted.keys() | given.keys() if wanted.get(key) != given.get(key)
    )
    if set(different) <= {"sampler", "guidance"} and _samples_alike(given, wanted):
        different = []
    if different:
        raise ValueError(
            f"{cell.folder} holds a run whose {different[0]} is {given.get(different[0])}, not "
            f"{wanted.get(different[0])}; choose another compare.out, or remove that folder."
        )
    return (cell.folder / "score.json").exists() or (cell.folder / FAILED).exists()


def _samples_alike(given: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Return whether both sample alike; older runs say it in fewer words."""
    return build_sampling(given["sampler"], given["guidance"]) == build_sampling(
        wanted["sampler"], wanted["guidance"]
    )


def _how_to_start(folder: Path) -> dict[str, Any]:
    """Return the keywords that continue a run that was cut off, or start it."""
    try:
        find_checkpoint(folder)
    except CheckpointError:
        return {"resume": None, "overwrite": True}
    return {"resume": "latest", "overwrite": False}
