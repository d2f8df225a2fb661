"""Scan orders: curves that visit every token of a grid once.

An order is a permutation, order[place along the curve] = raster position; its inverse is the rank,
rank[raster position] = place along the curve. On the kept tokens alone

    rank[ids].argsort(1)

is the full curve with the missing tokens deleted.

The Hilbert curve is generalised to any grid. path(w, h) goes from the corner (0, 0) to the corner
(w - 1, 0) of w columns and h rows, by one of

    long (2 w > 3 h, or h = 2):   path(w1, h), path(w - w1, h)                  w1 even, near w / 2
    else: up  path(h1, w1)^T,  across  path(w, h - h1),  down  path(h1, w - w1)^T
                                                             h1 even, near h / 2; w1 near w / 2

On a chessboard the two corners of a path that visits every square once differ in colour if w h is
even and are alike if it is odd, so such a path needs an even w or an odd h. An even w1 and an even
h1 keep that true of every part, and of a grid itself one side at least meets it. So every step of
the curve goes to one of the 4 neighbours, for every grid, odd sides too; on 2^k x 2^k the curve is
Hilbert's own (1891), and an aligned square of side 2^j is left only when all of it was visited.

B batch, N = h * w tokens in raster order, K kept tokens.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from tread_zoo.errors import unknown_name

Path = tuple[tuple[int, int], ...]  # (column, row)


Device = torch.device | None


def raster(grid: tuple[int, int], device: Device = None) -> Tensor:
    """Row after row, each from the left: int64 [N]."""
    return torch.arange(grid[0] * grid[1], device=device)


def serpentine(grid: tuple[int, int], device: Device = None) -> Tensor:
    """Row after row, every second one from the right: int64 [N]; every step is one token long."""
    return _serpentine(raster(grid, device).view(grid))


def hilbert(grid: tuple[int, int], device: Device = None) -> Tensor:
    """The generalised Hilbert curve above: int64 [N]; every step is one token long.

    It goes along the longer side; where just one side is even, along that.
    """
    height, width = grid
    swap = height > width if height % 2 == width % 2 else height % 2 == 0
    path = _hilbert(height, width) if swap else _hilbert(width, height)
    places = [x * width + y if swap else y * width + x for x, y in path]
    return torch.tensor(places, device=device)


def serpentine8(grid: tuple[int, int], index: int, device: Device = None) -> Tensor:
    """The serpentine order of layer `index`, int64 [N]: one of eight (ZigMa, arXiv 2403.13802).

    An even index runs along rows, an odd one along columns; index // 2 mod 4 gives the corner that
    it starts from: upper left, upper right, lower left, lower right.
    """
    places = raster(grid, device).view(grid)
    if index // 2 % 2:
        places = places.flip(1)
    if index // 4 % 2:
        places = places.flip(0)
    return _serpentine(places.T if index % 2 else places)


ORDERS: dict[str, Callable[[tuple[int, int], int, Device], Tensor]] = {
    "raster": lambda grid, index, device: raster(grid, device),
    "serpentine": lambda grid, index, device: serpentine(grid, device),
    "hilbert": lambda grid, index, device: hilbert(grid, device),
    "serpentine8": serpentine8,
}


def scan_order(name: str, grid: tuple[int, int], index: int = 0, device: Device = None) -> Tensor:
    """Return the order of layer `index`, int64 [N]: place along the curve -> raster position.

    Args:
        name: raster, serpentine, hilbert: the same for every layer; serpentine8: one of eight.
        grid: (h, w).
        index: of the layer, from 0.
        device: where it is made; all but a Hilbert curve without a copy from the CPU.

    Raises:
        ValueError: an unknown name, a negative index, or an empty grid.
    """
    if name not in ORDERS:
        raise unknown_name("scan order", name, ORDERS)
    if index < 0 or min(grid) < 1:
        raise ValueError(f"a scan order needs index={index} >= 0 and sides of grid={grid} >= 1.")
    return ORDERS[name](grid, index, device)


def inverse(order: Tensor) -> Tensor:
    """Return the rank of an order, int64 [N]: raster position -> place along the curve."""
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return rank


def _serpentine(places: Tensor) -> Tensor:
    """Read a matrix of raster positions row by row, every second row backwards."""
    turned = places.clone()
    turned[1::2] = places[1::2].flip(1)
    return turned.flatten()


@lru_cache(maxsize=4096)
def _hilbert(width: int, height: int) -> Path:
    """Return path(w, h) of the module's docstring; w is even or h is odd."""
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
