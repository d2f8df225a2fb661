"""Scan orders: curves that visit every token of a grid once.

An order is a permutation, order[index along the curve] = raster position. Its inverse is the rank,
rank[raster position] = index along the curve. For kept tokens at the raster positions ids [B, K],
rank[ids].argsort(1) is the full curve with the missing tokens deleted.

The Hilbert curve is generalised to any grid. On w columns and h rows, path(w, h) goes from the
corner (0, 0) to the corner (w - 1, 0), by one of

    long (2 w > 3 h, or h = 2):   path(w1, h), path(w - w1, h)                  w1 even, near w / 2
    else: up  path(h1, w1)^T,  across  path(w, h - h1),  down  path(h1, w - w1)^T
                                                             h1 even, near h / 2; w1 near w / 2

On a chessboard, the two ends of a path over all squares have different colours if w h is even, and
the same colour if it is odd. Such a path therefore needs an even w or an odd h. Even w1 and h1 keep
this true for every part, and any grid meets it in at least one orientation. So every step goes to
one of the 4 neighbours, also on grids with odd sides. On 2^k x 2^k the curve is Hilbert's (1891):
it leaves an aligned square of side 2^j only after it has visited all of it.

B batch, N = h * w tokens in raster order, K kept tokens.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from tread_zoo.errors import unknown_name

Path = tuple[tuple[int, int], ...]  # (column, row)
Device = torch.device | None
ScanOrder = Literal["raster", "serpentine", "hilbert", "serpentine8"]


def raster(grid: tuple[int, int], index: int = 0, device: Device = None) -> Tensor:
    """Return the raster order, each row from left to right, whatever `index` is: int64 [N]."""
    return torch.arange(grid[0] * grid[1], device=device)


def serpentine(grid: tuple[int, int], index: int = 0, device: Device = None) -> Tensor:
    """Return the order that goes through every second row backwards, whatever `index` is: int64
    [N]."""
    return _serpentine(raster(grid, device=device).view(grid))


def hilbert(grid: tuple[int, int], index: int = 0, device: Device = None) -> Tensor:
    """Return the generalised Hilbert order, int64 [N], whatever `index` is; see the module's
    docstring.

    The curve goes from corner to corner along the longer side, or along the even side if only one
    is even.
    """
    height, width = grid
    swap = height > width if height % 2 == width % 2 else height % 2 == 0
    path = _hilbert(height, width) if swap else _hilbert(width, height)
    places = [x * width + y if swap else y * width + x for x, y in path]
    return torch.tensor(places, device=device)


def serpentine8(grid: tuple[int, int], index: int = 0, device: Device = None) -> Tensor:
    """Return the serpentine order of layer `index`, one of eight: int64 [N] (arXiv 2403.13802).

    Even indices run along rows, odd ones along columns. index // 2 mod 4 is the corner where the
    curve starts: upper left, upper right, lower left, lower right.
    """
    places = raster(grid, device=device).view(grid)
    if index // 2 % 2:
        places = places.flip(1)
    if index // 4 % 2:
        places = places.flip(0)
    return _serpentine(places.T if index % 2 else places)


ORDERS: dict[str, Callable[[tuple[int, int], int, Device], Tensor]] = {
    order.__name__: order for order in (raster, serpentine, hilbert, serpentine8)
}


def scan_order(name: str, grid: tuple[int, int], index: int = 0, device: Device = None) -> Tensor:
    """Return the order of layer `index`, int64 [N]: index along the curve -> raster position.

    Args:
        name: `raster`, `serpentine` or `hilbert`, which give all layers the same order, or
            `serpentine8`, which gives them eight orders in turn.
        grid: (h, w).
        index: index of the layer, from 0.
        device: device of the result. A Hilbert curve is computed on the CPU and copied there.

    Raises:
        ValueError: `name` is unknown.
    """
    if name not in ORDERS:
        raise unknown_name("scan_order", name, ORDERS)
    return ORDERS[name](grid, index, device)


def inverse(order: Tensor) -> Tensor:
    """Return the rank of an order, int64 [N]: raster position -> index along the curve."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return rank


def _serpentine(places: Tensor) -> Tensor:
    """Return the raster positions `places` [h, w] as one line, int64 [N]: row after row, every
    second row backwards."""
    turned = places.clone()
    turned[1::2] = places[1::2].flip(1)
    return turned.flatten()


@lru_cache(maxsize=4096)
def _hilbert(width: int, height: int) -> Path:
    """Return path(w, h) of the module's docstring, as (column, row) pairs, for w even or h odd."""
    if height == 1:
        return tuple((x, 0) for x in range(width))
    if width == height == 2:
        return ((0, 0), (0, 1), (1, 1), (1, 0))
    if 2 * width > 3 * height or height == 2:
        near = 2 * round(width / 4)
        further = _hilbert(width - near, height)
        return (*_hilbert(near, height), *((x + near, y) for x, y in further))
    half, low = width // 2, 2 * round(height / 4)
    up = ((y, x) for x, y in _hilbert(low, half))
    across = ((x, y + low) for x, y in _hilbert(width, height - low))
    down = ((width - 1 - y, low - 1 - x) for x, y in _hilbert(low, width - half))
    return (*up, *across, *down)
