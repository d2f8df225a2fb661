"""No routing: every block sees every token."""

from dataclasses import dataclass, field

from tread_zoo.registry import register
from tread_zoo.routing.method import Crossings, Method, Stack, Step
from tread_zoo.seeding import ImageGenerator


@register("routing", "none")
@dataclass(frozen=True, kw_only=True)
class NoRouting(Method):
    """Every block sees every token."""

    warm_start: float = field(default=0.0, init=False)
    dense_tail: float = field(default=0.0, init=False)
    probability: float = field(default=1.0, init=False)

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        return ()

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        raise ValueError("the network was trained with routing=none: train with routing=tread.")


NO_ROUTING = NoRouting()
