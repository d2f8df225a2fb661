"""Layer dropout: a range of blocks is left out in some steps, for all tokens together."""

from collections.abc import Sequence
from dataclasses import dataclass

from tread_zoo.fields import Auto, Fraction
from tread_zoo.registry import register
from tread_zoo.routing.method import Crossings, Method, Stack, Step
from tread_zoo.routing.select import Skip
from tread_zoo.seeding import ImageGenerator


@register("routing", "layer_drop")
@dataclass(frozen=True, kw_only=True)
class LayerDrop(Method):
    """A range of blocks is left out at random: a baseline for methods that drop tokens.

    Stochastic depth (arXiv 1603.09382) and LayerDrop (1909.11556) decide for each block by itself.
    Here, all blocks of the range are left out together, and nothing is rescaled in sampling.

    Args:
        start, end: the range is start … end-1; negative values count from the end, as in Python
            slices. auto is the backbone's default.
        drop: probability that a step leaves the range out.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    drop: Fraction = 0.5

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        return self.weak(stack) if step.chance("layer drop") < self.drop else ()

    def outcomes(
        self, stack: Stack, images: ImageGenerator, step: Step
    ) -> Sequence[tuple[float, Crossings]]:
        return [(1 - self.drop, ()), (self.drop, self.weak(stack))]

    def weak(self, stack: Stack) -> Crossings:
        return (Skip(*stack.span(self.start, self.end)),)

    @property
    def idle_weights(self) -> bool:
        return True
