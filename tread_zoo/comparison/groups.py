"""Runs that differ in their seed alone, as one setting with a spread."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tread_zoo.comparison import markdown
from tread_zoo.comparison.grid import SEED, Cell
from tread_zoo.comparison.results import RunResult


@dataclass(frozen=True)
class Group:
    """A setting and its runs.

    choices: what it chose of the compared fields, "" for fields of other grids.
    seeds, results: of its runs, those that failed included.
    """

    choices: Mapping[str, str]
    seeds: tuple[str, ...]
    results: tuple[RunResult, ...]

    @property
    def label(self) -> str:
        """The choices in words."""
        return ", ".join(value for value in self.choices.values() if value) or "run"

    @property
    def ended(self) -> dict[str, RunResult]:
        """By seed, the runs that did not fail."""
        pairs = zip(self.seeds, self.results, strict=True)
        return {seed: result for seed, result in pairs if not result.failed}

    @property
    def is_dense(self) -> bool:
        """Whether it was compared as the one without routing."""
        return self.choices.get("routing") == "none"

    def is_dense_of(self, other: "Group") -> bool:
        """Return whether this is `other` without its routing, alike in all that this one chose."""
        chosen = {f: v for f, v in self.choices.items() if v and f != "routing"}
        alike = all(other.choices.get(field) == value for field, value in chosen.items())
        return self.is_dense and not other.is_dense and alike


def group_runs(cells: Sequence[Cell], results: Sequence[RunResult]) -> list[Group]:
    """Return the groups, in the order in which they first come."""
    fields = list(dict.fromkeys(f for cell in cells for f in cell.choices if f != SEED))
    found: dict[tuple[str, ...], list[tuple[str, RunResult]]] = {}
    for cell, result in zip(cells, results, strict=True):
        key = tuple(cell.choices.get(field, "") for field in fields)
        found.setdefault(key, []).append((cell.choices.get(SEED, ""), result))
    return [
        Group(dict(zip(fields, key, strict=True)), *map(tuple, zip(*members, strict=True)))
        for key, members in found.items()
    ]


def spread(
    results: Sequence[RunResult],
    value: Callable[[RunResult], float | None],
    scale: float = 1.0,
    form: str = ".4f",
) -> str:
    """Return the mean, and smallest … largest where they differ as printed; "" if none has it."""
    return markdown.spread([v for r in results if (v := value(r)) is not None], scale, form)
