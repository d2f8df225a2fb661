"""Route plans: where in the depth the routes lie and how many tokens each lets through.

A plan belongs to a configuration; each training step draws concrete routes from it.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tread_zoo.errors import unknown_name
from tread_zoo.routing.routes import PathDrop, Route, num_kept_tokens
from tread_zoo.routing.selectors import SELECTORS, Selector, build_selector

logger = logging.getLogger(__name__)

REJOINS = ("replace", "project")
_ROUTE_FIELDS = ("start", "end", "selection_rate", "selector", "block_size", "segment_length")


@dataclass(frozen=True)
class RoutePlan:
    """One route before its tokens are drawn.

    Args:
        start, end: blocks start … end-1 run on the kept tokens, counted from 0.
        selection_rate: fraction of tokens that bypasses, in [0, 1).
        selector: draws which tokens stay.
        selector_name: the selector's name, for logs.
    """

    start: int
    end: int
    selection_rate: float
    selector: Selector
    selector_name: str

    def __post_init__(self) -> None:
        num_kept_tokens(1, self.selection_rate)
        if not 0 <= self.start < self.end:
            raise ValueError(f"route start={self.start}, end={self.end} is empty or negative.")

    def draw(self, batch: int, grid: tuple[int, int], generator: torch.Generator) -> Route:
        """Draw ids [B, K] for a batch of grids."""
        num_kept = num_kept_tokens(grid[0] * grid[1], self.selection_rate)
        return Route(self.start, self.end, self.selector(batch, grid, num_kept, generator))


@dataclass(frozen=True)
class Routing:
    """The routes of a network, in ascending order and disjoint; none means dense.

    Args:
        plans: the routes.
        rejoin: `replace` puts the kept tokens back (TREAD), `project` fuses them with what came
            (`tread_zoo.routing.fusion`).
        path_drop_probability: chance that a routed step drops the paths of all routes.
    """

    plans: tuple[RoutePlan, ...] = ()
    rejoin: str = "replace"
    path_drop_probability: float = 0.0

    def __post_init__(self) -> None:
        if self.rejoin not in REJOINS:
            raise unknown_name("routing.rejoin", self.rejoin, REJOINS)
        chance = self.path_drop_probability
        if (
            isinstance(chance, bool)
            or not isinstance(chance, int | float)
            or not 0.0 <= chance < 1.0
        ):
            raise ValueError(
                f"routing.path_drop_probability={chance!r} must be a number in [0, 1): the chance "
                "that a step drops the routed path for its whole batch; 0 drops none."
            )
        if chance and self.rejoin != "project":
            raise ValueError(
                f"routing.path_drop_probability={chance} needs routing.rejoin=project: without a "
                "fusion nothing tells the later blocks that the path was dropped."
            )

    @property
    def fused_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges at whose end the network must fuse: what `Backbone.add_fusions` takes."""
        if self.rejoin != "project":
            return ()
        return tuple((plan.start, plan.end) for plan in self.plans)

    def draw(
        self, batch: int, grid: tuple[int, int], generator: torch.Generator
    ) -> tuple[Route, ...]:
        """Draw one concrete route per plan."""
        return tuple(plan.draw(batch, grid, generator) for plan in self.plans)

    def drop_paths(
        self, routes: Sequence[Route], generator: torch.Generator
    ) -> tuple[Route | PathDrop, ...]:
        """Return the routes of a step or, with `path_drop_probability`, dropped paths instead.

        One number is drawn whatever the probability, so that it changes nothing else.
        """
        if float(torch.rand((), generator=generator)) < self.path_drop_probability:
            return tuple(PathDrop(route.start, route.end) for route in routes)
        return tuple(routes)

    def describe(self, grid: tuple[int, int]) -> str:
        """Return one line for the log."""
        if not self.plans:
            return "none: every block sees every token"
        num_tokens = grid[0] * grid[1]
        text = "; ".join(
            f"blocks {p.start} … {p.end - 1} see {num_kept_tokens(num_tokens, p.selection_rate)} "
            f"of {num_tokens} tokens ({p.selector_name})"
            for p in self.plans
        )
        if self.rejoin == "project":
            text += ", fused where they rejoin"
        if self.path_drop_probability:
            text += f", dropped in {self.path_drop_probability:.0%} of the steps"
        return text


def build_routing(
    name: str,
    *,
    num_blocks: int,
    default_selector: str = "random",
    default_range: tuple[int, int] = (2, -4),
    start: int | str = "auto",
    end: int | str = "auto",
    selection_rate: float = 0.5,
    selector: str = "auto",
    block_size: int = 2,
    segment_length: int = 4,
    routes: Sequence[Mapping[str, Any]] = (),
    rejoin: str = "replace",
    path_drop_probability: float = 0.0,
) -> Routing:
    """Build the routing of a network with `num_blocks` blocks.

    Args:
        name: `none` or `tread`.
        default_selector, default_range: what `auto` means for this backbone.
        start, end: as in Python slices, negative counts from the end; `auto` is the backbone's own
            range (2 … -4 after TREAD), made shorter, with a message, where the depth is too small.
        selection_rate: fraction of tokens that bypasses.
        selector: a name in `SELECTORS`, or `auto`.
        block_size, segment_length: sizes for the selectors `blocks` and `segments`.
        routes: several routes in sequence, each a mapping with any of the fields above; what one
            leaves out it takes from the arguments. Empty: one route from the arguments.
        rejoin, path_drop_probability: see `Routing`; of all routes.

    Raises:
        ValueError: a name, field or value that does not work, with the field's name.
    """
    if name not in ("none", "tread"):
        raise unknown_name("routing.name", name, ("none", "tread"))
    if name == "none":
        return Routing()
    common = {
        "start": start,
        "end": end,
        "selection_rate": selection_rate,
        "selector": selector,
        "block_size": block_size,
        "segment_length": segment_length,
    }
    plans = []
    for index, fields in enumerate(routes or [{}]):
        label = f"routing.routes[{index}]" if routes else "routing"
        for field in fields:
            if field not in _ROUTE_FIELDS:
                raise unknown_name(label, field, _ROUTE_FIELDS)
        plans.append(
            _build_plan(label, num_blocks, default_selector, default_range, {**common, **fields})
        )
    for before, after in itertools.pairwise(plans):
        if after.start < before.end:
            raise ValueError(
                f"routing.routes: [{after.start}, {after.end}) starts before "
                f"[{before.start}, {before.end}) ends; list disjoint routes in ascending order."
            )
    return Routing(tuple(plans), rejoin, path_drop_probability)


def _build_plan(
    label: str,
    num_blocks: int,
    default_selector: str,
    default_range: tuple[int, int],
    fields: Mapping[str, Any],
) -> RoutePlan:
    rate = fields["selection_rate"]
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate < 1.0:
        raise ValueError(
            f"{label}.selection_rate={rate} must be a number in [0, 1): the fraction of tokens "
            "that bypass the routed blocks; use 0.5, or routing=none for no routing."
        )
    first, last = _resolve_range(label, fields["start"], fields["end"], num_blocks, default_range)
    name = fields["selector"]
    if name != "auto" and name not in SELECTORS:
        raise unknown_name(f"{label}.selector", name, ("auto", *SELECTORS))
    name = default_selector if name == "auto" else name
    chosen = build_selector(
        name, block_size=fields["block_size"], segment_length=fields["segment_length"]
    )
    return RoutePlan(first, last, float(rate), chosen, name)


def _resolve_range(
    label: str,
    start: int | str,
    end: int | str,
    num_blocks: int,
    default_range: tuple[int, int],
) -> tuple[int, int]:
    """Return start and end counted from 0; `auto` on both ends fits itself to the depth."""
    given: list[int] = []
    for field, value, default in (("start", start, 0), ("end", end, 1)):
        value = default_range[default] if value == "auto" else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{label}.{field}={value!r} must be an integer or auto.")
        given.append(value + num_blocks if value < 0 else value)
    first, last = given
    if 0 <= first < last <= num_blocks:
        return first, last
    if start == "auto" and end == "auto" and num_blocks >= 3:
        # Never the first block, never the last: what the papers' ablations agree on.
        fitted = (1, num_blocks - max(1, num_blocks // 3))
        logger.warning(
            "routing: the default route %d … %d does not fit %d blocks; using [%d, %d) instead. "
            "Set routing.start and routing.end to choose.",
            *default_range,
            num_blocks,
            *fitted,
        )
        return fitted
    raise ValueError(
        f"{label}.start={start}, {label}.end={end} is no range of blocks within the depth: there "
        f"are {num_blocks} blocks, and 0 <= start < end <= {num_blocks} must hold (negative values "
        "count from the end, as in Python slices). Change them, or set routing=none."
    )
