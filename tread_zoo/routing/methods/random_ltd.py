"""Random-LTD (arXiv 2211.11586): each block drops its own tokens, fewer as training goes on."""

from dataclasses import dataclass

from tread_zoo.fields import Auto
from tread_zoo.registry import register
from tread_zoo.routing.method import Bypass, Crossings, Stack
from tread_zoo.routing.timing import Rate
from tread_zoo.seeding import ImageGenerator


@register("routing", "random_ltd")
@dataclass(frozen=True, kw_only=True)
class RandomLTD(Bypass):
    """Each block of a range drops its own tokens, fewer as training goes on (random-LTD).

    arXiv 2211.11586. As in the paper, all blocks but the first and the last drop tokens, chosen
    anew for every block, and the rate falls to 0 over training. A dropped token bypasses the block.
    """

    start: Auto | int = 1
    end: Auto | int = -1
    selection_rate: Rate = ("linear", 0.5, 0.0)

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        blocks = range(*self.span(stack)) if rate > 0 else ()
        num_kept = stack.num_kept(rate)
        return tuple(stack.select((i, i + 1), self.selector, num_kept, images) for i in blocks)
