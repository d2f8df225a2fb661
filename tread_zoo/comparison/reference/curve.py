"""A reference curve: what a recipe gave with several seeds, as one small JSON file.

    run folders -> checked against the recipe and each other -> thinned -> <recipe>.json

Training losses are means over windows, so thinning them averages neighbours; of the held-out loss
lines are left out. All numbers have five significant digits.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tread_zoo.comparison.markdown import SAME_PROTOCOL
from tread_zoo.comparison.reference.settings import COMPARED, differences
from tread_zoo.comparison.reference.traces import HELD_OUT, TRAINING, Trace, at_steps
from tread_zoo.comparison.results import seen_images

MAX_POINTS = 50  # of a curve


@dataclass(frozen=True)
class SeedCurve:
    """One run of a recipe.

    Args:
        seed: its own.
        curves: values by name, at the steps of the whole curve.
        scores: at the end.
        images_per_s, peak_memory: measured; bytes, None if the run does not say.
        machine: device, precision, num_processes, torch.
    """

    seed: int
    curves: Mapping[str, tuple[float, ...]]
    scores: Mapping[str, float]
    images_per_s: float
    peak_memory: float | None
    machine: Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """A recipe's curve.

    Args:
        recipe: its name.
        command: what made the runs.
        hardware: in words.
        package: version, and the commit of the checkout.
        settings: of the recipe; what differs between runs of it left out.
        protocol: how the scores were made.
        training_steps, held_out_steps: where the curves have their points.
        runs: at least two.
        data_note: what their data's name does not say, in words; "" if there is nothing.
    """

    recipe: str
    command: str
    hardware: str
    package: Mapping[str, str | None]
    settings: dict[str, Any]
    protocol: Mapping[str, Any]
    training_steps: tuple[int, ...]
    held_out_steps: tuple[int, ...]
    runs: tuple[SeedCurve, ...]
    data_note: str = ""

    @property
    def data(self) -> str:
        """The data's name and the note on them."""
        name = str(self.settings["data"]["name"])
        return f"{name} ({self.data_note})" if self.data_note else name

    @property
    def seeds(self) -> str:
        """The seeds in words."""
        return ", ".join(str(run.seed) for run in self.runs)

    @property
    def names(self) -> list[str]:
        """The curves that all runs have."""
        return [n for n in (*TRAINING, *HELD_OUT) if all(n in run.curves for run in self.runs)]

    def steps_of(self, name: str) -> tuple[int, ...]:
        """Return the steps of the points of a curve."""
        return self.training_steps if name in TRAINING else self.held_out_steps

    def points_of(self, name: str, run: SeedCurve) -> list[tuple[int, float]]:
        """Return (step, value) of a curve of one run."""
        return list(zip(self.steps_of(name), run.curves[name], strict=True))

    def scores_of(self, name: str) -> list[float]:
        """Return a score of the runs that have it."""
        return [run.scores[name] for run in self.runs if name in run.scores]

    def seconds_of(self, run: SeedCurve) -> float:
        """Return the seconds of all training steps of a run at its median speed: what its clock
        says is of the time since it was resumed."""
        return seen_images(self.settings["training"], run.machine) / run.images_per_s

    def as_text(self) -> str:
        """Return the file's text: a line for each list."""
        record = asdict(self)
        if not self.data_note:
            del record["data_note"]
        return _compact(record) + "\n"


def make_curve(
    recipe: str,
    wanted: Mapping[str, Any],
    traces: Sequence[Trace],
    *,
    hardware: str = "",
    data_note: str = "",
    package: Mapping[str, str | None] | None = None,
) -> Curve:
    """Return the curve of a recipe from runs of it.

    Args:
        recipe: its name.
        wanted: its settings, see `wanted_settings`.
        traces: runs that have ended, of different seeds.
        hardware: in words; "" takes what the runs say.
        data_note: see `Curve`.
        package: version and commit.

    Raises:
        ValueError: fewer than two runs, one that has not ended, settings that are not the recipe's
            (the first field that differs is named), or runs that do not belong together.
    """
    if len(traces) < 2:
        raise ValueError(f"runs={[t.folder for t in traces]}: a curve needs two seeds or more.")
    for trace in traces:
        _check_run(recipe, wanted, trace, traces[0])
    seeds = [int(trace.settings["seed"]) for trace in traces]
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"runs have the seeds {seeds}: give runs of different seeds.")
    steps = [_shared_steps(traces, names[0]) for names in (TRAINING, HELD_OUT)]
    training_steps, held_out_steps = (_thinned(found) for found in steps)
    if len(training_steps) < 3:
        raise ValueError(
            f"{traces[0].folder} and the others share {len(training_steps)} lines of the training "
            "loss; 3 or more make a curve: lower training.log_every, or give all runs the same."
        )
    first = traces[0].settings
    settings = {name: first[name] for name in COMPARED}
    return Curve(
        recipe=recipe,
        command=_command(recipe, wanted, first, seeds),
        hardware=hardware or str(traces[0].machine.get("device", "")),
        package=package or {},
        settings=settings,
        protocol={k: v for k, v in traces[0].protocol.items() if k in SAME_PROTOCOL},
        training_steps=training_steps,
        held_out_steps=held_out_steps,
        runs=tuple(_seed_curve(trace, training_steps, held_out_steps) for trace in traces),
        data_note=data_note,
    )


def _check_run(recipe: str, wanted: Mapping[str, Any], trace: Trace, first: Trace) -> None:
    if trace.failed or not trace.has_ended:
        why = trace.failed or "score.json is missing"
        raise ValueError(f"{trace.folder} is no run that has ended: {why}.")
    for points in trace.rows.values():
        lost = next((step for step, value in points if not math.isfinite(value)), None)
        if lost is not None:
            raise ValueError(
                f"{trace.folder} has a loss that is not finite, at step {lost}: it is no reference."
            )
    for field in COMPARED:
        if field not in trace.settings:
            raise ValueError(f"{trace.folder}: config.json says nothing of {field}.")
    found = differences(trace.settings, wanted, scoring=True)
    if found:
        raise ValueError(f"{trace.folder} is no run of {recipe}: {found[0]}.")
    ours, theirs = ({**run.protocol, **run.machine} for run in (trace, first))
    for key in (*SAME_PROTOCOL, "num_processes", "precision"):
        value, other = ours.get(key), theirs.get(key)
        if value != other:
            raise ValueError(
                f"{trace.folder} has {key}={value}, {first.folder} {key}={other}: they do not "
                "belong in one curve; run them alike."
            )


def _shared_steps(traces: Sequence[Trace], name: str) -> list[int]:
    return sorted(set.intersection(*({step for step, _ in t.rows.get(name, ())} for t in traces)))


def _thinned(steps: Sequence[int]) -> tuple[int, ...]:
    """Return every k-th of the steps, counted from the last, `MAX_POINTS` at the most."""
    every = max(1, math.ceil(len(steps) / MAX_POINTS))
    return tuple(steps[::-1][::every][::-1])


def _seed_curve(
    trace: Trace, training_steps: Sequence[int], held_out_steps: Sequence[int]
) -> SeedCurve:
    curves: dict[str, tuple[float, ...]] = {}
    for names, steps in ((TRAINING, training_steps), (HELD_OUT, held_out_steps)):
        for name in names:
            values = at_steps(trace.rows.get(name, ()), steps, windows=names is TRAINING)
            if steps and len(values) == len(steps):
                curves[name] = tuple(_round(value) for value in values.values())
    assert trace.images_per_s is not None, "a run that has lines of its loss has their speed"
    return SeedCurve(
        seed=int(trace.settings["seed"]),
        curves=curves,
        scores={name: _round(value) for name, value in trace.scores.items()},
        images_per_s=_round(trace.images_per_s),
        peak_memory=trace.peak_memory,
        machine=trace.machine,
    )


def _command(
    recipe: str,
    wanted: Mapping[str, Any],
    run: Mapping[str, Any],
    seeds: Sequence[int],
) -> str:
    """Return what makes such runs: the recipe, the free settings that were not its own, the seeds.

    Where files of the user lie is left to the user. What only one of both settings has is of
    another version; but see `TrainingOptions.as_settings` of score_every.
    """
    name = run["data"]["name"]
    given = {"data.path": name} if name.endswith(".npz") else {}
    for group, usual in (("training", {"score_every": 0}), ("evaluation", {})):
        ours, theirs = ({**usual, **s.get(group, {})} for s in (run, wanted))
        given |= {
            f"{group}.{field}": value
            for field, value in ours.items()
            if field in theirs and value != theirs[field] and field != "keep_images"
        }
    texts = ["python scripts/train.py -m", f"experiment={recipe}"]
    texts += ["data=npz"] if "data.path" in given else []
    texts += [shlex.quote(f"{field}={_as_override(value)}") for field, value in given.items()]
    return " ".join([*texts, f"seed={','.join(map(str, seeds))}"])


def _as_override(value: Any) -> str:
    """Return a value as the command line takes it; of a path its name."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_as_override, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    name = Path(value).name
    return name if re.fullmatch(r"[\w.@+-]+", name) else json.dumps(name)


def load_curve(file: Path) -> Curve:
    """Read a curve.

    Raises:
        ValueError: the file is no curve.
    """
    try:
        record = json.loads(file.read_text())
        record.pop("summary", None)  # older files have what follows from the rest
        runs = []
        for run in record.pop("runs"):
            run.pop("seconds", None)
            run["curves"] = {name: tuple(values) for name, values in run["curves"].items()}
            runs.append(SeedCurve(**run))
        for name in ("training_steps", "held_out_steps"):
            record[name] = tuple(record[name])
        return Curve(**record, runs=tuple(runs))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is no reference curve ({error!r}); make it anew with scripts/make_curve.py."
        ) from error


def load_curves(folder: Path) -> dict[str, Curve]:
    """Return the curves of a folder, by recipe."""
    return {path.stem: load_curve(path) for path in sorted(folder.glob("*.json"))}


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _compact(value: Any, indent: str = "") -> str:
    """Return JSON with mappings spread over lines and lists on one."""
    if not isinstance(value, Mapping) or not value:
        is_nested = isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping)
        if not is_nested:
            return json.dumps(value, ensure_ascii=False)
        inner = ",\n".join(f"{indent} {_compact(entry, indent + ' ')}" for entry in value)
        return f"[\n{inner}\n{indent}]"
    lines = [f"{indent} {json.dumps(k)}: {_compact(v, indent + ' ')}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
