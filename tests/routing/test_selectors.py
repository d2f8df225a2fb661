import math

import pytest
import torch

from tread_zoo import available, create
from tread_zoo.routing import num_kept_tokens, scan_order
from tread_zoo.seeding import make_image_generator

RATES = (0.25, 0.5, 0.625, 0.75)
SELECTORS = [name for name in available("selector") if name != "norm"]


def draw(name, batch=8, grid=(8, 8), num_kept=32, seed=0, **sizes):
    generator = make_image_generator("test", seed, images=range(batch))
    return create("selector", name, **sizes)(batch, grid, num_kept, generator)


def mask(ids, grid):
    kept = torch.zeros(len(ids), grid[0] * grid[1], dtype=torch.bool)
    return kept.scatter(1, ids, True).view(-1, *grid)


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("grid", [(8, 8), (5, 7), (1, 9)])
def test_ids_are_sorted_unique_and_exactly_k(name, rate, grid):
    num_tokens = grid[0] * grid[1]
    num_kept = num_kept_tokens(num_tokens, rate)
    ids = draw(name, grid=grid, num_kept=num_kept)
    assert ids.dtype == torch.int64
    assert ids.shape == (8, num_kept)
    assert (ids[:, 1:] > ids[:, :-1]).all()
    assert ids.min() >= 0
    assert ids.max() < num_tokens


@pytest.mark.parametrize("name", SELECTORS)
def test_what_an_image_keeps_depends_on_seed_and_image_alone(name):
    whole, other = draw(name, batch=16, seed=3), draw(name, batch=16, seed=4)
    part = create("selector", name)(
        5, (8, 8), 32, make_image_generator("test", 3, images=range(5, 10))
    )
    assert torch.equal(whole[5:10], part)
    assert len({tuple(row.tolist()) for row in torch.cat([whole, other])}) > 16


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("num_kept", [29, 32])
def test_every_token_is_equally_likely(name, num_kept):
    share = mask(draw(name, batch=20000, num_kept=num_kept), (8, 8)).float().mean(0)
    # Standard deviation of a share of 20000 coin flips is below 0.0036.
    torch.testing.assert_close(share, torch.full((8, 8), num_kept / 64), atol=0.018, rtol=0)


@pytest.mark.parametrize(
    ("name", "sizes", "sideways", "vertical"),
    [
        ("random", {}, 0.50, 0.50),
        ("rows", {}, 1.00, 0.45),
        ("blocks", {"size": 2}, 0.78, 0.78),
        ("blocks", {"size": 4}, 0.91, 0.91),
    ],
)
def test_neighbours_that_stay_together(name, sizes, sideways, vertical):
    """The chance that a kept token's neighbour is kept, on 8x8 at rate 0.5."""
    kept = mask(draw(name, batch=4000, **sizes), (8, 8))
    right = (kept[:, :, 1:] & kept[:, :, :-1]).sum() / kept[:, :, :-1].sum()
    below = (kept[:, 1:] & kept[:, :-1]).sum() / kept[:, :-1].sum()
    assert float(right) == pytest.approx(sideways, abs=0.03)
    assert float(below) == pytest.approx(vertical, abs=0.03)


@pytest.mark.parametrize("order", ["raster", "serpentine", "hilbert"])
@pytest.mark.parametrize("grid", [(4, 16), (8, 8), (5, 7)])
def test_segments_are_contiguous_along_their_order(order, grid):
    num_tokens = grid[0] * grid[1]
    num_kept = num_tokens // 3 // 4 * 4
    ids = draw("segments", grid=grid, num_kept=num_kept, length=4, order=order)
    assert (ids.diff(dim=1) > 0).all()
    along = mask(ids, grid).flatten(1)[:, scan_order(order, grid)]
    whole = along[:, : num_tokens // 4 * 4].view(8, -1, 4).sum(-1)
    # The last piece of an odd grid is shorter, and then one segment is cut to reach the count.
    cut = ((whole > 0) & (whole < 4)).sum(-1)
    assert (cut <= (num_tokens % 4 > 0)).all()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("grid", [(8, 8), (5, 7), (1, 9)])
def test_structured_keeps_the_floor_or_the_ceiling_of_each_square_s_share(rate, grid):
    num_tokens = grid[0] * grid[1]
    num_kept = num_kept_tokens(num_tokens, rate)
    kept = mask(draw("structured", batch=500, grid=grid, num_kept=num_kept), grid)
    for row in range(0, grid[0], 2):
        for col in range(0, grid[1], 2):
            square = kept[:, row : row + 2, col : col + 2].flatten(1)
            share = num_kept * square.shape[1] / num_tokens
            found = set(square.sum(1).tolist())
            assert found <= {math.floor(share + 1e-9), math.ceil(share - 1e-9)}


@pytest.mark.parametrize("num_kept", [9, 17, 22])
def test_structured_keeps_all_tokens_of_an_odd_grid_alike(num_kept):
    """Squares at the edge are smaller: the rounding of their share must not favour them."""
    share = mask(draw("structured", batch=20000, grid=(5, 7), num_kept=num_kept), (5, 7))
    expected = torch.full((5, 7), num_kept / 35)
    torch.testing.assert_close(share.float().mean(0), expected, atol=0.018, rtol=0)
