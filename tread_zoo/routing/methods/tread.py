"""TREAD (arXiv 2501.04765): some tokens bypass a range of blocks and rejoin unchanged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic.dataclasses import dataclass as checked

from tread_zoo.fields import OPTIONS, Auto, check
from tread_zoo.registry import register
from tread_zoo.routing.method import (
    Crossings,
    Method,
    Selector,
    Stack,
    Step,
    describe_selection,
)
from tread_zoo.routing.timing import Rate, check_rate
from tread_zoo.seeding import ImageGenerator


@checked(frozen=True, kw_only=True, config=OPTIONS)
class Route:
    """One of several routes; None means the method's own option."""

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selection_rate: Rate | None = None
    selector: Selector | None = None


@register("routing", "tread")
@dataclass(frozen=True, kw_only=True)
class Tread(Method):
    """Some tokens bypass a range of blocks and rejoin unchanged (TREAD, arXiv 2501.04765).

    Args:
        start, end: blocks start … end-1 run on the kept tokens. Negative values count from the end,
            as in Python slices; auto is the backbone's default.
        selection_rate: fraction of tokens that bypass; [linear, 0.75, 0.25], [cosine, 0.75, 0.25]
            or [steps, 0.75, [0.3, 0.5]] change it over training.
        selector: how the kept tokens are chosen; auto is the backbone's default.
        per_batch: keep the same tokens for the whole batch.
        routes: several routes in sequence, [{start: 2, end: 5}, {start: 6, end: -2}], each with
            start, end, selection_rate and selector; the last two default to the options above.
        warm_start, dense_tail: fractions of training at its start and end without routes.
        probability: probability that a step is routed, the same draw on every rank.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selection_rate: Rate = 0.5
    selector: Selector = "auto"
    per_batch: bool = False
    routes: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for index, route in enumerate(self.routes):
            where = f"routing.routes[{index}]"
            own = check(Route, route, where)
            if own.selection_rate is not None:
                rate = own.selection_rate
                check_rate(f"{where}.selection_rate", rate, self.warm_start, self.dense_tail)
        super().__post_init__()

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        rates = [self.rate_at(step, rate) for rate in self.rates()]
        return self._select(stack, images, rates)

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        return self._select(stack, images, [rate] * len(self._routes(stack)))

    def rates(self) -> Sequence[Any]:
        return [route.get("selection_rate", self.selection_rate) for route in self.routes or [{}]]

    def describe_route(self, stack: Stack) -> str:
        return "; ".join(
            describe_selection(stack, span, rate, selector, self.per_batch)
            for (span, selector), rate in zip(self._routes(stack), self.rates(), strict=True)
        )

    def _select(self, stack: Stack, images: ImageGenerator, rates: Sequence[float]) -> Crossings:
        return tuple(
            stack.select(span, selector, stack.num_kept(rate), images, self.per_batch)
            for (span, selector), rate in zip(self._routes(stack), rates, strict=True)
            if rate > 0  # at rate 0 all tokens run: no route
        )

    def _routes(self, stack: Stack) -> list[tuple[tuple[int, int], Any]]:
        """Return the range and the selector of each route."""
        given: Sequence[Mapping[str, Any]] = self.routes or [{"start": self.start, "end": self.end}]
        routes = [
            (stack.span(r.get("start", "auto"), r.get("end", "auto")), self._selector(r))
            for r in given
        ]
        for ((start, before), _), ((after, end), _) in pairwise(routes):
            if after < before:
                raise ValueError(
                    f"routing.routes: [{after}, {end}) starts before [{start}, {before}) ends; "
                    "list disjoint routes in ascending order."
                )
        return routes

    def _selector(self, route: Mapping[str, Any]) -> Any:
        own = route.get("selector")
        return self.selector if own is None else own
