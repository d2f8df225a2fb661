"""Random-LTD (arXiv 2211.11586): each block drops its own tokens, fewer as training goes on."""

from dataclasses import dataclass

from tread_zoo.fields import Auto
from tread_zoo.registry import register
from tread_zoo.routing.method import (
    Crossings,
    Method,
    Selector,
    Stack,
    Step,
    describe_selection,
)
from tread_zoo.routing.timing import Rate
from tread_zoo.seeding import ImageGenerator


@register("routing", "random_ltd")
@dataclass(frozen=True, kw_only=True)
class RandomLTD(Method):
    """Each block of a range drops its own tokens, fewer as training goes on (random-LTD).

    arXiv 2211.11586. As in the paper, all blocks but the first and the last drop tokens, chosen
    anew for every block; the rate falls to 0.

    Args:
        start, end: the blocks that drop tokens, start … end-1, as a Python slice.
        selection_rate: fraction of tokens that bypass a block; by default it falls over training.
        selector: how the kept tokens are chosen; auto is the backbone's default.
        warm_start, dense_tail: fractions of training at its start and end without routes.
        probability: probability that a step is routed, the same draw on every rank.
    """

    start: Auto | int = 1
    end: Auto | int = -1
    selection_rate: Rate = ("linear", 0.5, 0.0)
    selector: Selector = "auto"

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        return self.sample(stack, images, self.rate_at(step))

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        blocks = range(*stack.span(self.start, self.end)) if rate > 0 else ()
        num_kept = stack.num_kept(rate)
        return tuple(stack.select((i, i + 1), self.selector, num_kept, images) for i in blocks)

    def describe_route(self, stack: Stack) -> str:
        span = stack.span(self.start, self.end)
        chosen = describe_selection(stack, span, self.selection_rate, self.selector)
        return f"{chosen}, other ones in every block"
