"""The runs of a study, those that differ in seed alone as one group."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tread_zoo.training.checkpoints import Checkpoint, CheckpointError, find_checkpoint

# What makes the networks of two runs the same setting; how a run scored itself does not.
SAME_SETTING = (
    "backbone", "routing", "objective", "data", "data_options", "training", "sampler", "step",
)  # fmt: skip


@dataclass(frozen=True)
class RunGroup:
    """Checkpoints of one setting, ordered by seed; `label` is how the report names it."""

    label: str
    checkpoints: tuple[Checkpoint, ...]


def seed_of(checkpoint: Checkpoint) -> int:
    """Return the seed of the run that left a checkpoint."""
    return checkpoint.meta["seed"]


def run_name(checkpoint: Checkpoint) -> str:
    """Return the name of the folder of the run that left a checkpoint."""
    return checkpoint.path.parent.parent.name


def group_runs(paths: Sequence[str]) -> list[RunGroup]:
    """Return the runs in groups, in the order in which they are given.

    Args:
        paths: folders of runs, whose newest checkpoints are taken, or checkpoints.

    Raises:
        ValueError: no path, or one seed of a setting twice.
        CheckpointError: no checkpoint, a damaged one, or one that was imported.
    """
    if not paths:
        raise ValueError("runs=[] names no run; give their folders: runs=[runs/a,runs/b].")
    groups: list[list[Checkpoint]] = []
    for path in paths:
        found = find_checkpoint(path)
        if "data" not in found.meta:
            raise CheckpointError(
                f"{found.path} was imported, and knows no data of its own to be compared with. It "
                "can be sampled: scripts/sample.py."
            )
        alike = next((group for group in groups if _setting(group[0]) == _setting(found)), None)
        if alike is None:
            groups.append([found])
            continue
        for other in alike:
            if seed_of(other) == seed_of(found):
                raise ValueError(
                    f"runs: {other.path} and {found.path} have the same settings and seed "
                    f"{seed_of(found)}; give each run once."
                )
        alike.append(found)
    labels = _labels([group[0] for group in groups])
    return [
        RunGroup(label, tuple(sorted(group, key=seed_of)))
        for label, group in zip(labels, groups, strict=True)
    ]


def _setting(checkpoint: Checkpoint) -> dict[str, Any]:
    return {key: checkpoint.meta.get(key) for key in SAME_SETTING}


def _labels(firsts: Sequence[Checkpoint]) -> list[str]:
    """Return the names of the runs without their seed, numbered where several are the same."""
    names = [re.sub(r"[,_-]*seed=?\d+$", "", run_name(first)) or "run" for first in firsts]
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]
