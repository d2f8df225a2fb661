import math

import pytest
import torch

from tread_zoo.routing import Route, check_routes, num_kept_tokens


def route(ids, start=1, end=3):
    return Route(start, end, torch.tensor(ids))


@pytest.mark.parametrize("num_tokens", [1, 3, 16, 49, 64, 100, 256])
def test_num_kept_is_n_minus_floor_of_n_times_rate(num_tokens):
    for percent in range(100):
        exact = num_tokens - num_tokens * percent // 100
        assert num_kept_tokens(num_tokens, percent / 100) == exact
        assert exact >= 1


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan])
def test_rate_outside_zero_to_one(rate):
    with pytest.raises(ValueError, match="selection_rate"):
        num_kept_tokens(16, rate)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[3, 1]], "ascending"),
        ([[0, 1], [2, 2]], "ascending"),
        ([[-1, 2]], "ascending"),
        ([[0.0, 1.0]], "int64"),
        ([0, 1], "int64"),
    ],
)
def test_ids_that_are_no_sorted_rows_raise(ids, words):
    with pytest.raises(ValueError, match=words):
        route(ids)


@pytest.mark.parametrize(("start", "end"), [(2, 2), (3, 1), (-1, 2)])
def test_empty_ranges_raise(start, end):
    with pytest.raises(ValueError, match="start="):
        route([[0, 1]], start, end)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ([route([[0, 1], [0, 1]], 2, 9)], "8 blocks"),
        ([route([[0, 1], [0, 1]], 2, 4), route([[0, 1], [0, 1]], 3, 5)], "disjoint"),
        ([route([[0, 1], [0, 1]], 4, 6), route([[0, 1], [0, 1]], 1, 2)], "disjoint"),
        ([route([[0, 1]])], "batch of 1, not 2"),
        ([route([[0, 1], [0, 16]])], "16 tokens"),
    ],
)
def test_routes_that_do_not_fit_the_network(routes, words):
    with pytest.raises(ValueError, match=words):
        check_routes(routes, num_blocks=8, num_tokens=16, batch=2)
