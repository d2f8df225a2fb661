"""Scan orders visit every token once, step by step, and survive the loss of tokens."""

import pytest
import torch

from tread_zoo.routing import ORDERS, inverse, scan_order

GRIDS = [(1, 1), (1, 7), (6, 1), (4, 4), (5, 7), (7, 4), (16, 16)]


def steps(order, grid):
    """Return how far apart consecutive tokens lie, in rows and columns together."""
    return (order // grid[1]).diff().abs() + (order % grid[1]).diff().abs()


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("grid", GRIDS)
def test_an_order_visits_every_token_once_and_its_rank_undoes_it(name, grid):
    for index in range(8):
        order = scan_order(name, grid, index)
        everything = torch.arange(grid[0] * grid[1])
        assert order.dtype == torch.int64
        assert torch.equal(order.sort().values, everything)
        assert torch.equal(inverse(order)[order], everything)
        assert torch.equal(order[inverse(order)], everything)


@pytest.mark.parametrize("name", ["serpentine", "hilbert", "serpentine8"])
def test_every_step_goes_to_a_neighbour_on_every_grid_of_odd_and_even_sides(name):
    for height in range(1, 8):
        for width in range(1, 8):
            for index in range(8 if name == "serpentine8" else 1):
                order = scan_order(name, (height, width), index)
                assert (steps(order, (height, width)) == 1).all(), (height, width, index)


@pytest.mark.parametrize("side", [2, 4, 8, 16, 32])
def test_hilbert_leaves_an_aligned_square_only_when_all_of_it_was_visited(side):
    order = scan_order("hilbert", (side, side))
    assert float(steps(order, (side, side)).float().mean()) == 1.0
    square = side
    while square > 1:
        square //= 2
        squares = order // side // square * side + order % side // square
        assert (squares.view(-1, square * square).diff(dim=1) == 0).all(), square


def test_the_eight_serpentines_are_every_corner_with_every_direction():
    grid, width = (4, 6), 6
    orders = [scan_order("serpentine8", grid, index).tolist() for index in range(8)]
    assert len({tuple(order) for order in orders}) == 8
    corners = [0, 0, 5, 5, 18, 18, 23, 23]
    assert [order[0] for order in orders] == corners
    for index, order in enumerate(orders):
        along_rows = order[0] // width == order[1] // width
        assert along_rows == (index % 2 == 0)
    assert scan_order("serpentine8", grid, 11).tolist() == orders[3]
