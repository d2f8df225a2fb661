"""The options of routing, as dataclasses: what `build_routing` takes, and a run's configuration has
under `routing`."""

from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from tread_zoo.fields import OPTIONS, Auto, Fraction, check
from tread_zoo.registry import complete


def _selector(part: Any) -> Any:
    return part if part == "auto" else complete("selector", part, "routing.selector")


def _rate_range(given: Any) -> Any:
    with suppress(TypeError, IndexError):  # what is no pair of numbers
        if given is None or given[0] < given[1]:
            return given and tuple(given)
    raise ValueError(
        f"routing.rate_range={given!r} must be two rates, the lower one first, as in [0.25, 0.75]."
    )


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RouteConfig:
    """One route: which blocks see which tokens. docs/routing.md says which to choose.

    Args:
        start, end: blocks start … end-1 run on the kept tokens; as in Python slices, negative from
            the end; auto is the backbone's own range.
        selection_rate: the fraction of tokens that bypasses.
        selector: which tokens stay; auto is the backbone's own.
        per_batch: the whole batch keeps the same tokens.
        schedule: how the rate changes over training: constant; linear or cosine, from
            `selection_rate` to `final_rate`; steps, as in `rate_steps`.
        final_rate: for linear and cosine.
        rate_steps: for steps: [[0.3, 0.5], [0.6, 0.25]] is 0.5 from 30 % of training, 0.25 from
            60 %; until the first, `selection_rate`.
        rate_range: [lowest, highest]: each step draws its rate, in place of `selection_rate`, and
            sampler.selection_rate may be any of them.
        carry_from: the tokens that bypass rejoin as they were before this block; null: `start`.
        detach: they rejoin without gradient.
        sparsify: false: they run through the blocks and the result is thrown away: routing without
            its saving.
        redraw: each block of the route draws its own tokens.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selection_rate: Fraction = 0.5
    selector: Annotated[Auto | dict[str, Any], BeforeValidator(_selector)] = "auto"
    per_batch: bool = False
    schedule: Literal["constant", "linear", "cosine", "steps"] = "constant"
    final_rate: Fraction | None = None
    rate_steps: tuple[tuple[Fraction, Fraction], ...] = ()
    rate_range: Annotated[tuple[Fraction, Fraction] | None, BeforeValidator(_rate_range)] = None
    carry_from: int | None = None
    detach: bool = False
    sparsify: bool = True
    redraw: bool = False


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RoutingConfig(RouteConfig):
    """Tokens bypass blocks in training (TREAD, arXiv 2501.04765). Sampling is dense, unless
    `sampler.selection_rate` or a guidance says otherwise.

    Args:
        name: tread, or none: every block sees every token.
        routes: several in sequence, each with any field of `RouteConfig`; those that it leaves out
            are taken from here. [{start: 2, end: 5}, {start: 6, end: -2, selection_rate: 0.25}]
        warm_start, dense_tail: fractions of training at its start and end that are dense.
        probability: chance that a step is routed, the same on every rank.
        rejoin: replace: as processed (TREAD); project: fused by a learned map (docs/rejoining.md);
            mask: learned tokens in the places of those that bypassed.
        bypassed: for rejoin=project: what stands for a bypassed token in the map, its dense value
            or zero, SPRINT's mask token.
        path_drop_probability: chance that a step leaves the routed blocks out; needs
            rejoin=project.
        reconstruction_weight: null: one loss for all tokens; else the loss of the kept ones, plus
            this weight times the error in reconstructing the noisy patches of the others.
    """

    name: Literal["none", "tread"] = "tread"
    routes: tuple[dict[str, Any], ...] = ()
    warm_start: Fraction = 0.0
    dense_tail: Fraction = 0.0
    probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    rejoin: Literal["replace", "project", "mask"] = "replace"
    bypassed: Literal["dense", "zero"] = "dense"
    path_drop_probability: Fraction = 0.0
    reconstruction_weight: NonNegativeFloat | None = None

    def __post_init__(self) -> None:
        for index, route in enumerate(self.routes):
            check(RouteConfig, route, f"routing.routes[{index}]")
        if self.warm_start + self.dense_tail >= 1:
            raise ValueError(
                f"routing.warm_start={self.warm_start} and routing.dense_tail={self.dense_tail} "
                "leave nothing to route: their sum must be below 1."
            )
        if self.bypassed != "dense" and self.rejoin != "project":
            raise ValueError(
                f"routing.bypassed={self.bypassed} is of the map of routing.rejoin=project: set "
                "that, or leave it out."
            )
        if self.path_drop_probability and self.rejoin != "project":
            raise ValueError(
                f"routing.path_drop_probability={self.path_drop_probability} needs "
                "routing.rejoin=project: without a fusion nothing tells the later blocks that the "
                "path was dropped."
            )
        for field, usual in (("carry_from", None), ("detach", False), ("redraw", False)):
            values = [getattr(self, field), *(route.get(field, usual) for route in self.routes)]
            if self.rejoin == "mask" and any(value != usual for value in values):
                raise ValueError(
                    f"routing.{field} and routing.rejoin=mask do not go together: nothing of a "
                    "token that bypassed is left behind a route. Leave it out, or set "
                    "routing.rejoin=replace."
                )
