"""TREAD (arXiv 2501.04765): some tokens bypass a range of blocks and rejoin unchanged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pydantic.dataclasses import dataclass as checked

from tread_zoo.fields import OPTIONS, Auto, check
from tread_zoo.registry import register
from tread_zoo.routing.method import Bypass, Crossings, Selector, Stack, Step
from tread_zoo.routing.timing import Rate
from tread_zoo.seeding import ImageGenerator


@checked(frozen=True, kw_only=True, config=OPTIONS)
class Route:
    """Options of one of several routes of a `Tread`: a range of blocks start … end-1, its selection
    rate and its selector. If the last two are None, those of the `Tread` are used."""

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    selection_rate: Rate | None = None
    selector: Selector | None = None


@register("routing", "tread")
@dataclass(frozen=True, kw_only=True)
class Tread(Bypass):
    """Some tokens bypass a range of blocks and rejoin unchanged (TREAD, arXiv 2501.04765).

    Args:
        routes: several routes in sequence, such as [{start: 2, end: 5}, {start: 6, end: -2}]. Each
            may also have a selection_rate and a selector; these default to the method's options.
    """

    routes: tuple[dict[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for index, route in enumerate(self.routes):
            check(Route, route, f"routing.routes[{index}]")
        super().__post_init__()

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        return self._bypass(stack, images, [self.rate_at(step, rate) for rate in self.rates()])

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        return self._bypass(stack, images, [rate] * len(self._parts()))

    def rates(self) -> Sequence[Any]:
        return [part.selection_rate for part in self._parts()]

    def _parts(self) -> "list[Tread]":
        """Return a `Tread` with one range of blocks for each of `routes`, with the options of that
        route. If there are no `routes`, return this `Tread` alone."""
        parts = []
        for route in self.routes:
            given = {key: value for key, value in route.items() if value is not None}
            parts.append(replace(self, **{"start": "auto", "end": "auto", **given, "routes": ()}))
        return parts or [self]

    def _bypass(self, stack: Stack, images: ImageGenerator, rates: Sequence[float]) -> Crossings:
        parts = self._parts()
        for (start, before), (after, end) in pairwise(part.span(stack) for part in parts):
            if after < before:
                raise ValueError(
                    f"routing.routes: [{after}, {end}) starts before [{start}, {before}) ends; "
                    "list disjoint routes in ascending order."
                )
        found: Crossings = ()
        for part, rate in zip(parts, rates, strict=True):
            found += part.bypass(stack, images, rate)
        return found
