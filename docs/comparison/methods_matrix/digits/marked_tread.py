"""A control: TREAD with a learned mark on the tokens that bypassed blocks.

    x_i -> x_i + m    after the range of blocks, for each token x_i that bypassed it

So later blocks can tell the two kinds of tokens apart. m is zero at first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tread_zoo import register
from tread_zoo.contract.crossing import Crossing
from tread_zoo.routing.method import Stack
from tread_zoo.routing.methods.tread import Tread
from tread_zoo.routing.select import Ranked, Select


class Marks(nn.Module):
    """A vector m for each stream of tokens."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.marks = nn.ParameterList(torch.zeros(width) for width in widths)

    def marked(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the streams [B, E + N, D] with m added to every token."""
        return tuple(x + mark.to(x.dtype) for x, mark in zip(streams, self.marks, strict=True))

    def cross(self, crossings: Sequence[Crossing]) -> list[Crossing]:
        """Return the crossings, each with marks on the tokens that it leaves out."""
        return [
            replace(each, absent=self.marked) if isinstance(each, Select | Ranked) else each
            for each in crossings
        ]


@register("routing", "marked_tread")
@dataclass(frozen=True, kw_only=True)
class MarkedTread(Tread):
    """Some tokens bypass a range of blocks, and carry a learned mark after it."""

    def build(self, stack: Stack) -> nn.Module:
        return Marks(stack.widths)
