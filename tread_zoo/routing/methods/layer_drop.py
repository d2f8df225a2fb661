"""Layer dropout: blocks are left out in training, for all tokens together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tread_zoo.fields import Auto, Fraction
from tread_zoo.registry import register
from tread_zoo.routing.method import Crossings, Method, Stack, Step, leave_out
from tread_zoo.routing.select import Skip
from tread_zoo.seeding import ImageGenerator


@register("routing", "layer_drop")
@dataclass(frozen=True, kw_only=True)
class LayerDrop(Method):
    """Blocks are left out at random, for all tokens: a baseline for methods that drop tokens.

    Stochastic depth (arXiv 1603.09382) and LayerDrop (1909.11556) decide for each block. Stochastic
    depth drops later blocks more often; here all blocks have the same rate, and nothing is rescaled
    in sampling.

    Args:
        start, end: blocks start … end-1 may be left out, as a Python slice; auto is the backbone's
            default range.
        drop: probability that a step leaves them out.
        unit: range drops all of them together; block decides for each block alone.
    """

    start: Auto | int = "auto"
    end: Auto | int = "auto"
    drop: Fraction = 0.5
    unit: Literal["range", "block"] = "range"

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        if self.unit == "range":
            return self.weak(stack) if step.chance("layer drop") < self.drop else ()
        blocks = range(*stack.span(self.start, self.end))
        return leave_out(i for i in blocks if step.chance(f"layer drop {i}") < self.drop)

    def outcomes(
        self, stack: Stack, images: ImageGenerator, step: Step
    ) -> Sequence[tuple[float, Crossings]]:
        if self.unit == "range":
            return [(1 - self.drop, ()), (self.drop, self.weak(stack))]
        # FLOPs add up over blocks, so each block can be counted alone
        each = leave_out(range(*stack.span(self.start, self.end)))
        return [(1 - self.drop * len(each), ()), *((self.drop, (skip,)) for skip in each)]

    def weak(self, stack: Stack) -> Crossings:
        return (Skip(*stack.span(self.start, self.end)),)

    @property
    def idle_weights(self) -> bool:
        return True
