"""Options of routing: the arguments of `build_routing`, and the field `routing` of a run."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat
from pydantic.dataclasses import dataclass

from tread_zoo.fields import OPTIONS, Auto, Fraction, check
from tread_zoo.registry import complete


def _selector(part: Any) -> Any:
    return part if part == "auto" else complete("selector", part, "routing.selector")


@dataclass(frozen=True, kw_only=True, config=OPTIONS)
class RouteConfig:
    """One route: which blocks see which tokens. See docs/routing.md for how to choose.

    Args:
        start, end: blocks start … end-1 run on the kept tokens. Negative values count from the end,
            as in Python slices; auto is the backbone's default.
        selection_rate: fraction of tokens that bypass.
        selector: how the kept tokens are chosen; auto is the backbone's default.
        per_batch: keep the same tokens for the whole batch.
        schedule: how the rate changes over training: constant; linear or cosine, from
            `selection_rate` to `final_rate`; or steps, given in `rate_steps`.
        final_rate: last rate of linear and cosine.
        rate_steps: of steps: [[0.3, 0.5], [0.6, 0.25]] is a rate of 0.5 from 30 % of training and
            0.25 from 60 %, with `selection_rate` before.
        carry_from: bypassed tokens rejoin as they were before this block; null: `start`.
        detach: bypassed tokens rejoin without gradient.
        sparsify: false: bypassed tokens run too, and the result is discarded. Nothing is saved.
        redraw: draw new tokens for each block of the route.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selection_rate: Fraction = 0.5
    selector: Annotated[Auto | dict[str, Any], BeforeValidator(_selector)] = "auto"
    per_batch: bool = False
    schedule: Literal["constant", "linear", "cosine", "steps"] = "constant"
    final_rate: Fraction | None = None
    rate_steps: tuple[tuple[Fraction, Fraction], ...] = ()
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
        routes: several routes in sequence, with fields of `RouteConfig`; missing fields are taken
            from here. [{start: 2, end: 5}, {start: 6, end: -2, selection_rate: 0.25}]
        warm_start, dense_tail: fractions of training at its start and end without routes.
        probability: probability that a step is routed, the same draw on every rank.
        rejoin: replace: kept tokens replace the old ones (TREAD); project: a learned map fuses both
            (docs/rejoining.md); mask: learned tokens replace those that bypassed.
        bypassed: for rejoin=project: input of the map for a bypassed token, its dense value or zero
            (SPRINT's mask token).
        path_drop_probability: probability that a step skips the routed blocks; needs
            rejoin=project.
        reconstruction_weight: null: one loss for all tokens. Otherwise the loss of the kept tokens,
            plus this weight times the error of reconstructing the noisy patches of the others.
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
                "leave no steps to route: their sum must be below 1."
            )
        for field, usual in (("bypassed", "dense"), ("path_drop_probability", 0.0)):
            value = getattr(self, field)
            if value != usual and self.rejoin != "project":
                raise ValueError(
                    f"routing.{field}={value} needs a network that learns to fuse streams: set "
                    f"routing.rejoin=project, or leave routing.{field} out."
                )
        for field, default in (("carry_from", None), ("detach", False), ("redraw", False)):
            values = [getattr(self, field), *(route.get(field, default) for route in self.routes)]
            if self.rejoin == "mask" and any(value != default for value in values):
                raise ValueError(
                    f"routing.{field} and routing.rejoin=mask exclude each other: a mask replaces "
                    f"the bypassed tokens. Leave routing.{field} out, or set "
                    "routing.rejoin=replace."
                )
