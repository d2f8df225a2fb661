"""Selectors: which tokens stay.

A selector is called with (batch, grid, num_kept, generator) and returns ids, int64 [B, K] on the
CPU, every row strictly ascending raster positions. Each sample of the batch draws its own tokens,
and every token is as likely to stay as any other, K / N. Attention does not mind which neighbours
are missing; scans, shifts and convolutions do, so `rows`, `blocks` and `segments` keep neighbours
together. `structured` spreads what stays evenly. What `norm` keeps depends on the network: see
`tread_zoo.routing.pending`.

B batch, N = h * w tokens, K kept tokens, G groups.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from pydantic import PositiveInt
from torch import Tensor

from tread_zoo.registry import register
from tread_zoo.routing.orders import scan_order

Grid = tuple[int, int]


class Selector(Protocol):
    """Draw the tokens that stay."""

    def __call__(
        self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator
    ) -> Tensor: ...


@register("selector", "random")
@dataclass(frozen=True)
class Random:
    """Every set of K tokens is equally likely (TREAD's own choice, for attention)."""

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator) -> Tensor:
        scores = torch.rand(batch, grid[0] * grid[1], generator=generator)
        return scores.argsort(dim=1)[:, :num_kept].sort(dim=1).values


@register("selector", "rows")
@dataclass(frozen=True)
class Rows:
    """Keep whole rows of the grid: left and right neighbours stay together, for raster scans."""

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator) -> Tensor:
        row = torch.arange(grid[0] * grid[1]) // grid[1]
        return keep_groups(row, batch, num_kept, generator)


@register("selector", "blocks")
@dataclass(frozen=True)
class Blocks:
    """Keep square blocks of the grid, for shifts and for scans of several directions.

    Args:
        size: side of a block, in tokens.
    """

    size: PositiveInt = 2

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator) -> Tensor:
        position = torch.arange(grid[0] * grid[1])
        row, col = position // grid[1] // self.size, position % grid[1] // self.size
        return keep_groups(row * -(-grid[1] // self.size) + col, batch, num_kept, generator)


@register("selector", "segments")
@dataclass(frozen=True)
class Segments:
    """Keep contiguous segments of a scan order: the longer, the fewer gaps a scan in it meets.

    Args:
        length: of a segment, in tokens.
        order: the curve that is cut.
    """

    length: PositiveInt = 4
    order: Literal["raster", "serpentine", "hilbert"] = "raster"

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator) -> Tensor:
        segment = torch.arange(grid[0] * grid[1]) // self.length
        places = keep_groups(segment, batch, num_kept, generator)
        return scan_order(self.order, grid)[places].sort(dim=1).values


@register("selector", "structured")
@dataclass(frozen=True)
class Structured:
    """Keep the same fraction of every 2x2 square of the grid: no hole is larger than it must be.

    Of a square with s tokens (fewer than 4 at an odd edge) the fraction is K s / N; it keeps the
    floor or the ceiling of that. Which squares get the ceiling is drawn by systematic sampling over
    a random order, in integers, so that the total is exactly K and the chance of the ceiling
    exactly the fraction's remainder; which tokens of a square stay is drawn uniformly.
    """

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator) -> Tensor:
        num_tokens = grid[0] * grid[1]
        position = torch.arange(num_tokens)
        row, col = position // grid[1] // 2, position % grid[1] // 2
        group = row * -(-grid[1] // 2) + col
        size = torch.bincount(group)
        floor, rest = size * num_kept // num_tokens, size * num_kept % num_tokens

        order = torch.rand(batch, len(size), generator=generator).argsort(dim=1)
        offset = torch.randint(num_tokens, (batch, 1), generator=generator)
        filled = torch.cat([offset, offset + rest[order].cumsum(dim=1)], dim=1) // num_tokens
        quota = floor + torch.empty_like(order).scatter_(1, order, filled.diff(dim=1))

        shuffled = torch.rand(batch, num_tokens, generator=generator).argsort(dim=1)
        by_group = shuffled.gather(1, group[shuffled].argsort(dim=1, stable=True))
        place = position - (size.cumsum(0) - size)[group[by_group]]  # within the square, shuffled
        stays = torch.empty(batch, num_tokens, dtype=torch.bool)
        stays.scatter_(1, by_group, place < quota.gather(1, group[by_group]))
        return stays.nonzero()[:, 1].view(batch, num_kept)


@register("selector", "norm")
@dataclass(frozen=True)
class Norm:
    """Keep tokens with chances in proportion to their norm before the route.

    The network gives the norms, so a route waits for them (`tread_zoo.routing.pending`); any
    selector with `needs_importance` does.
    """

    needs_importance: ClassVar[bool] = True

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: torch.Generator) -> Tensor:
        raise TypeError("selector=norm needs the network's importance: draw a route from a plan.")


def keep_groups(group: Tensor, batch: int, num_kept: int, generator: torch.Generator) -> Tensor:
    """Return ids [B, K]: whole groups in a random order until K tokens are reached.

    Only the last group can be cut. It is cut at a random place of its cyclic order, so that no
    position inside a group is favoured.

    Args:
        group: int64 [N], the group of each position, 0 … G-1.
        batch: B.
        num_kept: K.
        generator: on the CPU.
    """
    num_tokens, num_groups = len(group), int(group.max()) + 1
    position = torch.arange(num_tokens)
    size = torch.bincount(group, minlength=num_groups)
    place = torch.empty_like(position)  # a token's place within its group
    by_group = group.argsort(stable=True)
    place[by_group] = position - (size.cumsum(0) - size)[group[by_group]]

    order = torch.rand(batch, num_groups, generator=generator).argsort(dim=1).argsort(dim=1)
    shift = (torch.rand(batch, num_groups, generator=generator) * size).long()
    turned = (place + shift[:, group]) % size[group]
    key = order[:, group] * num_tokens + turned
    return key.argsort(dim=1)[:, :num_kept].sort(dim=1).values
