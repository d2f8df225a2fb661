"""Route plans: which blocks a route covers, and how many tokens it keeps.

A plan belongs to a configuration; each training step draws concrete routes from it:

    routing.at(step, num_steps, seed).draw(batch, grid, generator)

`at` returns the routing of one step, which depends on (seed, step) alone: it is the same on every
rank and for every micro-step. In sampling, the routes of an image depend on (seed, image,
evaluation) alone. B batch, N tokens, K kept tokens.
"""

import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from tread_zoo.fields import check
from tread_zoo.registry import create
from tread_zoo.routing.fusion import Bypassed
from tread_zoo.routing.options import RouteConfig, RoutingConfig
from tread_zoo.routing.pending import PendingRoute, draw_gumbel
from tread_zoo.routing.routes import (
    UNCHANGED,
    Bypass,
    PathDrop,
    Route,
    check_carries,
    num_kept_tokens,
)
from tread_zoo.routing.schedules import RateSchedule, build_schedule
from tread_zoo.routing.selectors import Selector
from tread_zoo.seeding import (
    Generator,
    make_generator,
    make_image_generator,
    per_image_generator,
)

logger = logging.getLogger(__name__)

ROUTE_FIELDS = tuple(field.name for field in fields(RouteConfig))


@dataclass(frozen=True)
class RoutePlan:
    """One route before its tokens are drawn: the values of a `RouteConfig`, with `start` and `end`
    counted from 0, the description `selector_name` for logs, and None for a constant schedule."""

    start: int
    end: int
    selection_rate: float
    selector: Selector
    selector_name: str
    per_batch: bool = False
    schedule: RateSchedule | None = None
    bypass: Bypass = UNCHANGED

    @property
    def needs_importance(self) -> bool:
        """Whether the selector needs the network's importance of the tokens."""
        return bool(getattr(self.selector, "needs_importance", False))

    def draw(
        self,
        batch: int,
        grid: tuple[int, int],
        generator: Generator,
        force_keep: Tensor | None = None,
    ) -> Route | PendingRoute:
        """Return a route with ids [B, K] at `selection_rate`; for `norm`, only its noise is drawn.

        Args:
            batch, grid: B, and the sides of the grid.
            generator: per image, or torch's; the ids are created on its device.
            force_keep: bool [B, N], tokens that must be among the K kept ones. With `per_batch`, a
                token forced in one image is kept in all.

        Raises:
            ValueError: `force_keep` has more tokens than the rate keeps.
        """
        num_tokens = grid[0] * grid[1]
        num_kept = num_kept_tokens(num_tokens, self.selection_rate)
        images = per_image_generator(generator, batch)
        images = images.of_batch if self.per_batch else images
        if force_keep is not None:
            force_keep = force_keep.any(dim=0, keepdim=True) if self.per_batch else force_keep
            most = int(force_keep.sum(dim=1).max())
            if most > num_kept:
                raise ValueError(
                    f"force_keep has {most} tokens of an image, and selection_rate="
                    f"{self.selection_rate} keeps {num_kept}: lower the rate, or force fewer."
                )
        if self.needs_importance:
            noise = draw_gumbel(num_tokens, images)
            if force_keep is not None:
                noise = noise.masked_fill(force_keep, math.inf)
            return PendingRoute(self.start, self.end, num_kept, noise, self.bypass, self.per_batch)
        ids = self.selector(len(images.keys), grid, num_kept, images)
        if force_keep is not None:  # forced tokens first, then the drawn ones
            order = images.rand(num_tokens) + 2 * force_keep
            order = order.scatter_add(1, ids, torch.ones(ids.shape, device=ids.device))
            ids = order.topk(num_kept, dim=1).indices.sort(dim=1).values
        make = Route if ids.device.type == "cpu" else Route.of_sorted  # checks would wait for a GPU
        return make(self.start, self.end, ids.expand(batch, -1), self.bypass)

    def describe(self, num_tokens: int) -> str:
        """Return a description of the route for logs."""
        rates, words = [self.selection_rate], [self.selector_name]
        if self.schedule is not None:
            rates = [rate for _, rate in self.schedule.stairs(range(1000), 1000)]
            words.append(self.schedule.describe())
        changed = {k: v for k, v in asdict(self.bypass).items() if v != getattr(UNCHANGED, k)}
        words += [f"{option} {value}" for option, value in changed.items()]
        if self.per_batch:
            words.append("the same for the whole batch")
        kept = sorted({num_kept_tokens(num_tokens, rate) for rate in (min(rates), max(rates))})
        return (
            f"blocks {self.start} … {self.end - 1} see {' … '.join(map(str, kept))} of "
            f"{num_tokens} tokens ({'; '.join(words)})"
        )


@dataclass(frozen=True)
class Routing:
    """The routes of a network, disjoint and in ascending order, and when they are used: the values
    of a `RoutingConfig`. Without plans it is dense."""

    plans: tuple[RoutePlan, ...] = ()
    warm_start: float = 0.0
    dense_tail: float = 0.0
    probability: float = 1.0
    rejoin: str = "replace"
    bypassed: Bypassed = "dense"
    path_drop_probability: float = 0.0
    reconstruction_weight: float | None = None

    @property
    def fused_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges that need a fusion, for `Backbone.add_fusions`."""
        return self.ranges if self.rejoin == "project" else ()

    @property
    def masked_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges that need mask tokens, for `Backbone.add_mask_tokens`."""
        return self.ranges if self.rejoin == "mask" else ()

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The block ranges [start, end) of the routes."""
        return tuple((plan.start, plan.end) for plan in self.plans)

    @property
    def is_scheduled(self) -> bool:
        """Whether steps differ in more than the drawn tokens."""
        plain = (self.warm_start, self.dense_tail, self.probability) == (0.0, 0.0, 1.0)
        return not plain or any(plan.schedule for plan in self.plans)

    def draw(
        self,
        batch: int,
        grid: tuple[int, int],
        generator: Generator,
        force_keep: Tensor | None = None,
    ) -> tuple[Route | PendingRoute, ...]:
        """Return one route per plan, see `RoutePlan.draw`; with a schedule, call `at` first."""
        images = per_image_generator(generator, batch)
        return tuple(plan.draw(batch, grid, images, force_keep) for plan in self.plans)

    def draw_by_evaluation(
        self, grid: tuple[int, int], seed: int, indices: Sequence[int]
    ) -> Callable[[float, int], tuple[Route, ...]]:
        """Return a function from a rate and an evaluation (0, 1, …) to the routes of sampled
        images, with ids [B, K] on the CPU; none at rate 0. Selectors must not need importance."""

        def routes(rate: float, evaluation: int) -> tuple[Route, ...]:
            if rate == 0:
                return ()
            generator = make_image_generator("sparse", seed, evaluation, images=indices)
            return self.at_rate(rate).draw(len(indices), grid, generator)  # type: ignore[return-value]

        return routes

    def at(self, step: int, num_steps: int, seed: int) -> "Routing":
        """Return the routing of optimizer step `step` of `num_steps`, without a schedule.

        Raises:
            ValueError: the routing is scheduled and the step is not one of 0 … num_steps-1.
        """
        if not self.is_scheduled:
            return self
        if not 0 <= step < num_steps:
            raise ValueError(f"step={step} is not one of the run's {num_steps}, from 0.")
        routed = self.routed_steps(num_steps)
        draw = torch.rand((), generator=make_generator("routed", seed, step))
        if step not in routed or float(draw) >= self.probability:
            return self._plain(())
        return self._if_routed(step, routed, num_steps)

    def at_rate(self, rate: float) -> "Routing":
        """Return this routing with one constant rate for all routes, as sampling uses it."""
        return self._plain([replace(p, selection_rate=rate, schedule=None) for p in self.plans])

    def routed_steps(self, num_steps: int) -> range:
        """Return the steps between the dense start and the dense end; a short run may have none."""
        return range(
            round(self.warm_start * num_steps), num_steps - round(self.dense_tail * num_steps)
        )

    def stages(self, num_steps: int) -> list[tuple[range, "Routing"]]:
        """Return ranges of steps, each with the routing of its routed steps.

        `probability` is not applied. A dense stage has no plans.
        """
        routed = self.routed_steps(num_steps)
        if not self.plans or not routed:
            return [(range(num_steps), self._plain(()))]
        edges = {routed.start, routed.stop}
        for plan in self.plans:
            if plan.schedule is not None:
                edges |= {step for step, _ in plan.schedule.stairs(routed, num_steps)}
        bounds = [0, *sorted(edge for edge in edges if edge in routed), routed.stop, num_steps]
        stages = []
        for begin, end in itertools.pairwise(bounds):
            if begin < end:
                inside = begin in routed
                used = self._if_routed(begin, routed, num_steps) if inside else self._plain(())
                stages.append((range(begin, end), used))
        return stages

    def drop_paths(
        self, routes: Sequence[Route | PendingRoute], generator: torch.Generator
    ) -> tuple[Route | PendingRoute | PathDrop, ...]:
        """Return `routes` or, with `path_drop_probability`, dropped paths in their place. One
        number is always drawn, so that the probability does not change other draws."""
        if float(torch.rand((), generator=generator)) < self.path_drop_probability:
            return tuple(PathDrop(route.start, route.end) for route in routes)
        return tuple(routes)

    def describe(self, grid: tuple[int, int]) -> str:
        """Return one line for the log."""
        if not self.plans:
            return "none: every block sees every token"
        words = [plan.describe(grid[0] * grid[1]) for plan in self.plans]
        if self.probability < 1:
            words.append(f"a step is routed with probability {self.probability:g}")
        for where, part in (("first", self.warm_start), ("last", self.dense_tail)):
            if part:
                words.append(f"the {where} {100 * part:.3g}% of training dense")
        if self.rejoin == "project":
            words.append(f"fused where they rejoin, {self.bypassed} for the bypassed")
        if self.rejoin == "mask":
            words.append("learned tokens in place of the bypassed")
        if self.path_drop_probability:
            words.append(f"dropped in {self.path_drop_probability:.0%} of the routed steps")
        return "; ".join(words)

    def _if_routed(self, step: int, routed: range, num_steps: int) -> "Routing":
        """Return the plain routing of a routed step."""
        plans = []
        for plan in self.plans:
            if plan.schedule is None:
                plans.append(plan)
                continue
            stairs = plan.schedule.stairs(routed, num_steps)
            rate = next(rate for begin, rate in reversed(stairs) if begin <= step)
            if rate > 0:  # a route that keeps all is none
                plans.append(replace(plan, selection_rate=rate, schedule=None))
        return self._plain(plans)

    def _plain(self, plans: Sequence[RoutePlan]) -> "Routing":
        """Return this routing with other plans and without a schedule."""
        return replace(self, plans=tuple(plans), warm_start=0.0, dense_tail=0.0, probability=1.0)


NO_ROUTING = Routing()


def build_routing(
    name: str = "tread",
    *,
    num_blocks: int,
    default_selector: str = "random",
    default_range: tuple[int, int] = (2, -4),
    **fields: Any,
) -> Routing:
    """Return the routing of a network with `num_blocks` blocks.

    Args:
        name: `none` or `tread`.
        default_selector, default_range: what `auto` means for this backbone; at a small depth, a
            shorter range is used, with a warning.
        fields: of `RoutingConfig`.

    Raises:
        ValueError: an unknown field or a wrong value, a route outside the depth, routes that
            overlap, or fields that the schedule does not use.
    """
    config = check(RoutingConfig, {"name": name, **fields}, "routing")
    if config.name == "none":
        return NO_ROUTING
    common = {field: getattr(config, field) for field in ROUTE_FIELDS}
    plans: list[RoutePlan] = []
    for index, route in enumerate(config.routes or [{}]):
        label = f"routing.routes[{index}]" if config.routes else "routing"
        options = _with_inherited(common, route)
        first, last = _resolve_range(
            label, options["start"], options["end"], num_blocks, default_range
        )
        chosen = default_selector if options["selector"] == "auto" else options["selector"]
        schedule = build_schedule(
            label, options, warm_start=config.warm_start, dense_tail=config.dense_tail
        )
        carry = options["carry_from"]
        plan = RoutePlan(
            first, last, float(options["selection_rate"]), create("selector", chosen),
            describe_part(chosen), per_batch=options["per_batch"],
            schedule=schedule,
            bypass=Bypass(
                carry + num_blocks if carry is not None and carry < 0 else carry,
                options["detach"], options["sparsify"],
            ),
        )  # fmt: skip
        spans = [(i, i + 1) for i in range(first, last)] if options["redraw"] else [(first, last)]
        plans += [replace(plan, start=start, end=end) for start, end in spans]
    for before, after in itertools.pairwise(plans):
        if after.start < before.end:
            raise ValueError(
                f"routing.routes: [{after.start}, {after.end}) starts before "
                f"[{before.start}, {before.end}) ends; list disjoint routes in ascending order."
            )
    check_carries(plans)
    shared = ("warm_start", "dense_tail", "probability", "rejoin", "bypassed",
              "path_drop_probability", "reconstruction_weight")  # fmt: skip
    return Routing(tuple(plans), **{field: getattr(config, field) for field in shared})


def describe_part(part: str | Mapping[str, Any]) -> str:
    """Return a part's name, with its options if there are any."""
    if isinstance(part, str):
        return part
    options = ", ".join(f"{k} {v}" for k, v in part.items() if k != "name")
    return f"{part['name']} ({options})" if options else str(part["name"])


def _with_inherited(common: Mapping[str, Any], route: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a route: its own and, for the rest, the common ones. A route that sets
    its schedule inherits only the fields which that uses."""
    inherited = dict(common)
    if "schedule" in route:
        if route["schedule"] not in ("linear", "cosine"):
            inherited["final_rate"] = None
        if route["schedule"] != "steps":
            inherited["rate_steps"] = ()
    return {**inherited, **route}


def _resolve_range(
    label: str,
    start: int | str,
    end: int | str,
    num_blocks: int,
    default_range: tuple[int, int],
) -> tuple[int, int]:
    """Return start and end counted from 0; `auto` on both ends fits itself to the depth."""
    given: list[int] = []
    for value, default in ((start, 0), (end, 1)):
        value = default_range[default] if isinstance(value, str) else value
        given.append(value + num_blocks if value < 0 else value)
    first, last = given
    if 0 <= first < last <= num_blocks:
        return first, last
    if start == "auto" and end == "auto" and num_blocks >= 3:
        # Never the first block, never the last: the papers' ablations agree on that.
        fitted = (1, num_blocks - max(1, num_blocks // 3))
        logger.warning(
            "routing: the default route %d … %d does not fit %d blocks; using [%d, %d) instead. "
            "Set routing.start and routing.end to choose.", *default_range, num_blocks, *fitted,
        )  # fmt: skip
        return fitted
    raise ValueError(
        f"{label}.start={start}, {label}.end={end} is not a range of the {num_blocks} blocks: "
        f"0 <= start < end <= {num_blocks} must hold (negative values count from the end, as in "
        "Python slices). Change them, or set routing=none."
    )
