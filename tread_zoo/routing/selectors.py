"""Selectors: which tokens stay.

A selector is a function (batch, grid, num_kept, generator) -> ids, int64 [B, K] on the CPU, every
row strictly ascending raster positions. Each sample of the batch draws its own tokens. Attention
does not mind which neighbours are missing; scans, shifts and convolutions do, so `rows`, `blocks`
and `segments` keep neighbours together.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from tread_zoo.errors import unknown_name


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
    if block_size < 1:
        raise ValueError(f"routing.block_size={block_size} must be at least 1.")
    return _grouped(
        lambda row, col, grid: (
            row // block_size * (-(-grid[1] // block_size)) + torch.floor_divide(col, block_size)
        )
    )


def segments_selector(segment_length: int = 4) -> Selector:
    """Keep contiguous segments of the raster order, for scans in one direction."""
    if segment_length < 1:
        raise ValueError(f"routing.segment_length={segment_length} must be at least 1.")
    return _grouped(lambda row, col, grid: (row * grid[1] + col) // segment_length)


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
}


def build_selector(name: str, *, block_size: int = 2, segment_length: int = 4) -> Selector:
    """Return the selector `name`; `blocks` takes `block_size`, `segments` takes `segment_length`.

    Raises:
        ValueError: an unknown name or a size below 1.
    """
    if name not in SELECTORS:
        raise unknown_name("routing.selector", name, SELECTORS)
    if name == "blocks":
        return blocks_selector(block_size)
    if name == "segments":
        return segments_selector(segment_length)
    return SELECTORS[name]()
