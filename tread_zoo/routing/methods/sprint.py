"""SPRINT (arXiv 2510.21986): a learned map fuses the tokens before and after a range of blocks.

    fused = W cat(dense, sparse) + b            W [D, 2D], at first [I, I] / 2; b at first 0
    dense  = the stream at the start of the range, all tokens
    sparse = the stream at its end; m for a token that did not run

There is one map per stream. It also fuses extra tokens, and runs in every call, with or without a
route. m is zero (`absent=zero`), a random vector of standard deviation 0.02 that is never trained
(`absent=token`, as in the released code), or the token's own dense value (`absent=dense`). In the
last case, sparse = dense + update, and the map acts on the update:

    fused = W cat(dense, update) + b            W at first [I, I], which is TREAD's rejoining

A path drop skips the range for all tokens: the fusion sees m everywhere.

B batch, E extra tokens, N tokens of the grid, D width of a stream, a tensor of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tread_zoo.contract.crossing import Crossing, Exit, Streams, Tokens
from tread_zoo.fields import Fraction
from tread_zoo.registry import register
from tread_zoo.routing.method import Bypass, Crossings, Stack, Step
from tread_zoo.routing.select import Ranked, Select, Skip, check_trained
from tread_zoo.routing.timing import Rate
from tread_zoo.seeding import ImageGenerator

Absent = Literal["token", "zero", "dense"]


@register("routing", "sprint")
@dataclass(frozen=True, kw_only=True)
class Sprint(Bypass):
    """Few tokens run the middle blocks; a learned map fuses the tokens before and after (SPRINT).

    The first and last blocks see all tokens. arXiv 2510.21986; end training with a short
    `dense_tail`, as the paper does.

    Args:
        absent: what the map gets for a token that did not run: `token` (a fixed random vector, as
            in the released code), `zero`, or `dense` (the token's own value before the range).
        path_drop: probability that a routed step skips the range for all tokens.
    """

    selection_rate: Rate = 0.75
    absent: Absent = "token"
    path_drop: Fraction = 0.1

    def route(self, stack: Stack, images: ImageGenerator, step: Step) -> Crossings:
        if step.chance("path drop") < self.path_drop:
            return self.weak(stack)
        return self.sample(stack, images, self.rate_at(step))

    def outcomes(
        self, stack: Stack, images: ImageGenerator, step: Step
    ) -> Sequence[tuple[float, Crossings]]:
        kept = self.sample(stack, images, self.rate_at(step))
        if not self.path_drop:
            return [(1.0, kept)]
        return [(1 - self.path_drop, kept), (self.path_drop, self.weak(stack))]

    def sample(self, stack: Stack, images: ImageGenerator, rate: float) -> Crossings:
        return self.bypass(stack, images, rate)

    def weak(self, stack: Stack) -> Crossings:
        if not self.path_drop:
            return super().weak(stack)
        return (Skip(*self.span(stack)),)

    def build(self, stack: Stack) -> nn.Module:
        return Fusions(self.span(stack), stack.widths, self.absent)

    @property
    def idle_weights(self) -> bool:
        return self.path_drop > 0


class Fusions(nn.Module):
    """Linear maps 2D -> D, one per stream, that fuse the tokens before and after a range of blocks.

    Args:
        span: start and end of the range.
        widths: D of each stream, a tensor of tokens that goes from block to block.
        absent: see `Sprint`.
    """

    def __init__(self, span: tuple[int, int], widths: Sequence[int], absent: Absent) -> None:
        super().__init__()
        self.span, self.kind = span, absent
        scale = 1.0 if absent == "dense" else 0.5
        self.weights = nn.ParameterList(scale * torch.eye(width).repeat(1, 2) for width in widths)
        self.biases = nn.ParameterList(torch.zeros(width) for width in widths)
        if absent == "token":
            for index, width in enumerate(widths):
                self.register_buffer(f"token_{index}", 0.02 * torch.randn(width))

    def cross(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        """Return a `Fuse` of the whole range, so that the maps also act in calls without routes,
        then `crossings`. Those of the whole range get this module's `absent`."""
        inner = [
            replace(each, absent=self.absent) if (each.start, each.end) == self.span else each
            for each in check_trained(crossings, self.span, (Select, Ranked))
        ]
        return [Fuse(*self.span, self), *inner]

    def absent(self, streams: Streams) -> Streams:
        """Return what the linear maps get in place of tokens that did not run the range. `streams`
        are the tensors of all tokens before the range; the results have their shapes."""
        if self.kind == "zero":
            return tuple(map(torch.zeros_like, streams))
        if self.kind == "token":
            tokens = [getattr(self, f"token_{index}") for index in range(len(streams))]
            return tuple(m.to(s.dtype).expand_as(s) for m, s in zip(tokens, streams, strict=True))
        return streams

    def forward(self, dense: Streams, output: Streams) -> Streams:
        """Return the fused streams, tensors of all tokens [B, E + N, D], in the precision of
        `dense`.

        Args:
            dense: the streams at the start of the range.
            output: the streams at its end; for tokens that did not run, what `absent` returns.
        """
        updates = self.kind == "dense"
        return tuple(
            F.linear(
                torch.cat([before, after - before if updates else after], dim=-1), weight, bias
            ).to(before.dtype)
            for before, after, weight, bias in zip(
                dense, output, self.weights, self.biases, strict=True
            )
        )


@dataclass(frozen=True)
class Fuse(Crossing):
    """After a range of blocks, `fusion` makes each stream (a tensor of tokens) from that stream
    before the range and after it."""

    fusion: Fusions

    def enter(self, tokens: Tokens) -> tuple[Tokens, Exit]:
        dense: Tensor | Streams = tokens.streams

        def exit(after: Tokens) -> Tokens:
            return after._replace(streams=self.fusion(dense, after.streams))

        return tokens, exit
