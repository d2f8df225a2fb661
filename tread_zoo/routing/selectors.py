"""Selectors: which tokens a route keeps.

A selector is called with (batch, grid, num_kept, generator) and returns ids, int64 [B, K] on the
generator's device: the raster positions of each image's kept tokens, strictly ascending. Tokens are
chosen per image, with random numbers from `generator.rand(n)`, [B, n]; each token is kept with
probability K / N. Scans, shifts and convolutions, unlike attention, suffer from missing neighbours,
so `rows`, `blocks` and `segments` keep neighbours together.

A selector with a method `score(tokens)`, [B, N, D] -> [B, N], instead chooses inside the network,
by the tokens' states before the route: see `tread_zoo.routing.select.Ranked`.

B batch, N = h * w tokens, K kept tokens, G groups.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from pydantic import PositiveInt
from torch import Tensor

from tread_zoo.registry import register
from tread_zoo.routing.orders import scan_order
from tread_zoo.seeding import ImageGenerator

Grid = tuple[int, int]


class Selector(Protocol):
    """Chooses the K = `num_kept` tokens of each image that a route keeps, and returns their raster
    positions, int64 [B, K], ascending; see the module's docstring. An optional method `check(grid)`
    raises ValueError if the selector's options do not suit the grid."""

    def __call__(
        self, batch: int, grid: Grid, num_kept: int, generator: ImageGenerator
    ) -> Tensor: ...


@register("selector", "random")
@dataclass(frozen=True)
class Random:
    """Keep random tokens; all sets of the same size are equally likely. TREAD's choice; it suits
    attention, which does not need neighbours."""

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: ImageGenerator) -> Tensor:
        scores = generator.rand(grid[0] * grid[1])
        return scores.argsort(dim=1)[:, :num_kept].sort(dim=1).values


@register("selector", "rows")
@dataclass(frozen=True)
class Rows:
    """Keep random whole rows of the grid; suits networks that scan row by row."""

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: ImageGenerator) -> Tensor:
        return keep_groups(tiles(grid, (1, grid[1]), generator.device), num_kept, generator)


@register("selector", "blocks")
@dataclass(frozen=True)
class Blocks:
    """Keep random square blocks of the grid; suits shifts and scans in several directions.

    Args:
        size: side of a block, in tokens.
    """

    size: PositiveInt = 2

    def check(self, grid: Grid) -> None:
        if self.size > max(grid):
            raise ValueError(
                f"selector=blocks with size={self.size} on a grid of {grid[0]}x{grid[1]} tokens: "
                "blocks must not be larger than the grid."
            )

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: ImageGenerator) -> Tensor:
        blocks = tiles(grid, (self.size, self.size), generator.device)
        return keep_groups(blocks, num_kept, generator)


@register("selector", "segments")
@dataclass(frozen=True)
class Segments:
    """Keep random contiguous segments of a scan order; longer segments leave fewer gaps.

    Args:
        length: length of a segment, in tokens.
        order: the scan order: `raster`, `serpentine` or `hilbert`.
    """

    length: PositiveInt = 4
    order: Literal["raster", "serpentine", "hilbert"] = "raster"

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: ImageGenerator) -> Tensor:
        line = (1, grid[0] * grid[1])
        segments = tiles(line, (1, self.length), generator.device)
        places = keep_groups(segments, num_kept, generator)
        return _order(self.order, grid, places.device)[places].sort(dim=1).values


@register("selector", "structured")
@dataclass(frozen=True)
class Structured:
    """Keep the same fraction of every 2x2 square of the grid, so that holes are small.

    If K of N tokens are kept, a square with s tokens (fewer than 4 at an odd edge) keeps the floor
    or the ceiling of K s / N. It keeps the ceiling with a probability equal to the fractional part
    of K s / N: systematic sampling over the squares in random order, in integers, so that the total
    is K. The tokens within a square are chosen uniformly.
    """

    def __call__(self, batch: int, grid: Grid, num_kept: int, generator: ImageGenerator) -> Tensor:
        num_tokens = grid[0] * grid[1]
        group, _, size = tiles(grid, (2, 2), generator.device)
        floor, rest = size * num_kept // num_tokens, size * num_kept % num_tokens

        order = generator.rand(len(size)).argsort(dim=1)
        offset = generator.randint(num_tokens, 1)
        filled = torch.cat([offset, offset + rest[order].cumsum(dim=1)], dim=1) // num_tokens
        quota = floor + torch.empty_like(order).scatter_(1, order, filled.diff(dim=1))

        shuffled = generator.rand(num_tokens).argsort(dim=1)
        by_group = shuffled.gather(1, group[shuffled].argsort(dim=1, stable=True))
        of_place = group[by_group]
        first = (size.cumsum(0) - size)[of_place]  # index within the square, shuffled
        place = torch.arange(num_tokens, device=group.device) - first
        kept = (place < quota.gather(1, of_place)).long()
        stays = torch.empty_like(by_group).scatter_(1, by_group, kept)
        return stays.argsort(dim=1, descending=True, stable=True)[:, :num_kept]


@register("selector", "norm")
@dataclass(frozen=True)
class Norm:
    """Keep random tokens, with probabilities proportional to the norms of their states before the
    route."""

    def score(self, tokens: Tensor) -> Tensor:
        return tokens.float().norm(dim=-1)


class Groups(NamedTuple):
    """A division of the N tokens of a grid into G groups: the `group` of each raster position,
    int64 [N], the `place` of each position within its group [N], and the `size` of each group [G].
    """

    group: Tensor
    place: Tensor
    size: Tensor


@functools.lru_cache(maxsize=64)
def tiles(grid: Grid, sides: Grid, device: torch.device) -> Groups:
    """Return the `Groups` that cut a grid into tiles of `sides` (height, width) tokens, smaller at
    the lower and right edges; cached per device."""
    position = torch.arange(grid[0] * grid[1])
    row, column = position // grid[1] // sides[0], position % grid[1] // sides[1]
    group = row * -(-grid[1] // sides[1]) + column
    size = torch.bincount(group)
    place = torch.empty_like(position)
    by_group = group.argsort(stable=True)
    place[by_group] = position - (size.cumsum(0) - size)[group[by_group]]
    return Groups(group.to(device), place.to(device), size.to(device))


def keep_groups(groups: Groups, num_kept: int, generator: ImageGenerator) -> Tensor:
    """Return the raster positions [B, K] of K = `num_kept` tokens: whole groups, in a random order,
    until there are K tokens.

    The last group may be cut; its tokens are rotated by a random shift first, so that no position
    within a group is favoured.
    """
    group, place, size = groups
    order = generator.rand(len(size)).argsort(dim=1).argsort(dim=1)
    shift = (generator.rand(len(size)) * size).long()
    turned = (place + shift[:, group]) % size[group]
    key = order[:, group] * len(group) + turned
    return key.argsort(dim=1)[:, :num_kept].sort(dim=1).values


@functools.lru_cache(maxsize=16)
def _order(name: str, grid: Grid, device: torch.device) -> Tensor:
    return scan_order(name, grid).to(device)
