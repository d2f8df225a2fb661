"""Mixture of Depths (arXiv 2404.02258): a learned score chooses the tokens that a block sees.

    s_i  = w . x_i + b                              of each token x_i, before a block f
    x_i -> x_i + sigmoid(s_i) (f(x)_i - x_i)        for the K tokens with the largest s

The sigmoid lets gradients reach the router w, b: a linear map D -> 1 per block. Sampling chooses
in the same way.

B batch, N tokens, K tokens that run, E extra tokens, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tread_zoo.contract.crossing import Crossing, Exit, Tokens
from tread_zoo.fields import Auto, Fraction
from tread_zoo.registry import register
from tread_zoo.routing.method import Crossings, Method, Stack
from tread_zoo.routing.select import Select, Skip
from tread_zoo.seeding import ImageGenerator


@register("routing", "mixture_of_depths")
@dataclass(frozen=True, kw_only=True)
class MixtureOfDepths(Method):
    """A learned score chooses which tokens a block sees, also in sampling (Mixture of Depths).

    arXiv 2404.02258. The paper multiplies a block's output by the raw score; here a sigmoid bounds
    it. The paper's best networks route every second block and let 12.5 % of the tokens run.

    Args:
        start, end: routed blocks are among start … end-1; negative values count from the end.
        selection_rate: fraction of tokens that bypass a routed block.
        every: step from one routed block to the next, from start on: 2 routes every second block.
    """

    start: Auto | int = 1
    end: Auto | int = -1
    selection_rate: Fraction = 0.875
    every: int = 2
    warm_start: float = field(default=0.0, init=False)
    dense_tail: float = field(default=0.0, init=False)
    probability: float = field(default=1.0, init=False)

    drawn = False
    keep_all_is_dense = False  # updates are scaled even then

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        num_kept = stack.num_kept(rate)
        return tuple(Weigh(i, i + 1, num_kept) for i in self._blocks(stack))

    def build(self, stack: Stack) -> nn.Module:
        default = self.sample(stack, None, self.selection_rate)  # type: ignore[arg-type]
        return Routers(stack.widths[0], default)

    def _blocks(self, stack: Stack) -> range:
        start, end = stack.span(self.start, self.end)
        return range(start, end, self.every)


class Routers(nn.Module):
    """A linear map D -> 1 for each routed block, which scores its tokens.

    Args:
        width: D of the tokens that are scored, which are the first stream.
        default: a `Weigh` for each routed block, for calls of the network that name no route.
    """

    def __init__(self, width: int, default: Sequence[Any]) -> None:
        super().__init__()
        self.default = default
        self.routers = nn.ModuleDict({str(each.start): nn.Linear(width, 1) for each in default})

    def cross(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        """Return `crossings`, each `Weigh` with the linear map of its block. If `crossings` has no
        `Weigh`, those of `default` are added. Raises ValueError for crossings that are neither a
        `Weigh` nor a `Skip`."""
        given = [each for each in crossings if isinstance(each, Weigh)]
        others = [each for each in crossings if not isinstance(each, Weigh)]
        if not all(isinstance(each, Skip) for each in others):
            raise ValueError("this network chooses tokens itself: routes are of its own method.")
        own: list[Any] = [
            replace(each, router=self.routers[str(each.start)]) for each in given or self.default
        ]
        return own + others


@dataclass(frozen=True)
class Weigh(Crossing):
    """Only the K tokens with the largest scores run; the sigmoid of a token's score scales the
    token's update.

    Args:
        num_kept: K.
        router: the linear map D -> 1 for this block, set by `Routers.cross`.
    """

    num_kept: int
    router: nn.Linear | None = None

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        assert self.router is not None
        extra = tokens.layout.num_extra
        score = self.router(tokens.streams[0][:, extra:]).squeeze(-1).float()
        ids = score.detach().topk(self.num_kept, dim=1).indices.sort(dim=1).values
        kept, exit = Select(self.start, self.end, ids).enter(tokens)
        weight = score.gather(1, ids).sigmoid()
        weight = torch.cat([weight.new_ones(len(weight), extra), weight], dim=1)[..., None]

        def weighed(after: Tokens) -> Tokens:
            streams = tuple(
                torch.lerp(before, moved, weight.to(moved.dtype).expand_as(moved))
                for before, moved in zip(kept.streams, after.streams, strict=True)
            )
            return exit(after._replace(streams=streams))

        return kept, weighed
