"""Selectors: which tokens stay.

A selector is a function (batch, grid, num_kept, generator) -> ids, int64 [B, K] on the CPU, every
row strictly ascending raster positions. Each sample of the batch draws its own tokens, and every
token is as likely to stay as any other, K / N. Attention does not mind which neighbours are
missing; scans, shifts and convolutions do, so `rows`, `blocks` and `segments` keep neighbours
together. `structured` spreads what stays evenly.

One more name, `norm`, is no such function: what it keeps depends on the network, see
`tread_zoo.routing.pending`.

B batch, N = h * w tokens, K kept tokens, G groups.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tread_zoo.errors import unknown_name
from tread_zoo.routing.orders import ORDERS, scan_order

SEGMENT_ORDERS = tuple(name for name in ORDERS if name != "serpentine8")


class Selector(Protocol):
    """Draw the tokens that stay."""

    def __call__(
        self, batch: int, grid: tuple[int, int], num_kept: int, generator: torch.Generator
    ) -> Tensor: ...


def random_selector() -> Selector:
    """Every set of K tokens is equally likely (TREAD's own choice, for attention)."""

    def select(
        batch: int, grid: tuple[int, int], num_kept: int, generator: torch.Generator
    ) -> Tensor:
        scores = torch.rand(batch, grid[0] * grid[1], generator=generator)
        return scores.argsort(dim=1)[:, :num_kept].sort(dim=1).values

    return select


def rows_selector() -> Selector:
    """Keep whole rows of the grid: left and right neighbours stay together, for raster scans."""
    return _grouped(lambda row, col, grid: row)


def blocks_selector(block_size: int = 2) -> Selector:
    """Keep square blocks of the grid, for shifts and for scans of several directions."""
    _check_size("routing.block_size", block_size)
    return _grouped(
        lambda row, col, grid: (
            row // block_size * (-(-grid[1] // block_size)) + torch.floor_divide(col, block_size)
        )
    )


def segments_selector(segment_length: int = 4, segment_order: str = "raster") -> Selector:
    """Keep contiguous segments of a scan order: raster, serpentine or hilbert.

    The longer a segment, the fewer gaps a scan in that order meets.
    """
    _check_size("routing.segment_length", segment_length)
    if segment_order not in SEGMENT_ORDERS:
        raise unknown_name("routing.segment_order", segment_order, SEGMENT_ORDERS)
    along_the_curve = _grouped(lambda row, col, grid: (row * grid[1] + col) // segment_length)

    def select(
        batch: int, grid: tuple[int, int], num_kept: int, generator: torch.Generator
    ) -> Tensor:
        places = along_the_curve(batch, grid, num_kept, generator)
        return scan_order(segment_order, grid)[places].sort(dim=1).values

    return select


def structured_selector() -> Selector:
    """Keep the same share of every 2x2 square of the grid: no hole is larger than it must be.

    Of a square with s tokens (fewer than 4 at an odd edge) the share is K s / N; it keeps the floor
    or the ceiling of that. Which squares get the ceiling is drawn by systematic sampling over a
    random order, in integers, so that the total is exactly K and the chance of the ceiling exactly
    the share's fraction; which tokens of a square stay is drawn uniformly.
    """

    def select(
        batch: int, grid: tuple[int, int], num_kept: int, generator: torch.Generator
    ) -> Tensor:
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

    return select


def _check_size(field: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{field}={value!r} must be an integer, at least 1.")


def _grouped(group_of: Callable[[Tensor, Tensor, tuple[int, int]], Tensor]) -> Selector:
    """Keep whole groups in a random order until K tokens are reached.

    Only the last group can be cut. It is cut at a random place of its cyclic order, so that no
    position inside a group is favoured.
    """

    def select(
        batch: int, grid: tuple[int, int], num_kept: int, generator: torch.Generator
    ) -> Tensor:
        num_tokens = grid[0] * grid[1]
        position = torch.arange(num_tokens)
        group = group_of(position // grid[1], position % grid[1], grid)
        num_groups = int(group.max()) + 1
        size = torch.bincount(group, minlength=num_groups)
        place = torch.empty_like(position)  # a token's place within its group
        by_group = group.argsort(stable=True)
        place[by_group] = position - (size.cumsum(0) - size)[group[by_group]]

        order = torch.rand(batch, num_groups, generator=generator).argsort(dim=1).argsort(dim=1)
        shift = (torch.rand(batch, num_groups, generator=generator) * size).long()
        turned = (place + shift[:, group]) % size[group]
        key = order[:, group] * num_tokens + turned
        return key.argsort(dim=1)[:, :num_kept].sort(dim=1).values

    return select


SELECTORS: dict[str, Callable[..., Selector]] = {
    "random": random_selector,
    "rows": rows_selector,
    "blocks": blocks_selector,
    "segments": segments_selector,
    "structured": structured_selector,
}


def build_selector(
    name: str, *, block_size: int = 2, segment_length: int = 4, segment_order: str = "raster"
) -> Selector:
    """Return the selector `name`.

    `blocks` takes `block_size`, `segments` takes `segment_length` and `segment_order`.

    Raises:
        ValueError: an unknown name or order, or a size below 1.
    """
    if name not in SELECTORS:
        raise unknown_name("routing.selector", name, SELECTORS)
    if name == "blocks":
        return blocks_selector(block_size)
    if name == "segments":
        return segments_selector(segment_length, segment_order)
    return SELECTORS[name]()
