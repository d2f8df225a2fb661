"""A walk over some tokens is the full walk with the others deleted, and is undone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import ORDERS, inverse, make_scan, reverse_gaps, scan_order

GRID = (4, 6)


def some_ids(batch, kept, seed=0):
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(batch, GRID[0] * GRID[1], generator=generator).argsort(dim=1)
    return order[:, :kept].sort(dim=1).values


@pytest.mark.parametrize("extra", [0, 2])
@pytest.mark.parametrize("name", ORDERS)
def test_the_walk_is_the_full_one_with_the_others_deleted(name, extra):
    ids, index = some_ids(3, 9), 5
    scan = make_scan(Layout(GRID, extra, ids), name, index)
    tokens = torch.cat([torch.full((3, extra), -1), ids], dim=1).double().unsqueeze(-1)
    walked = scan.permute(tokens).squeeze(-1).long()
    rank = inverse(scan_order(name, GRID, index))
    for row, kept, places in zip(walked, ids, scan.places, strict=True):
        full = [int(p) for p in scan_order(name, GRID, index) if p in kept]
        assert row.tolist() == [-1] * extra + full
        assert places.tolist() == sorted(rank[kept].tolist())
    assert torch.equal(scan.restore(scan.permute(tokens)), tokens)


def test_gaps_count_the_steps_of_the_full_walk():
    ids = torch.tensor([[0, 1, 4], [2, 3, 7]])
    scan = make_scan(Layout((2, 4), 2, ids), "raster", 0)
    assert scan.gaps().tolist() == [[1, 1, 1, 1, 3], [1, 1, 3, 1, 4]]
    assert scan.segment_ids().tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 2]]
    assert reverse_gaps(scan.gaps()).tolist() == [[1, 3, 1, 1, 1], [1, 4, 1, 3, 1]]
    alone = make_scan(Layout((2, 4), 0, ids), "raster", 0)
    assert alone.gaps().tolist() == [[1, 1, 3], [1, 1, 4]]
    turned = make_scan(Layout((2, 4), 0, torch.tensor([[3, 4, 7]])), "serpentine", 0)
    assert turned.gaps().tolist() == [[1, 1, 3]]  # 0 1 2 3 7 6 5 4


def test_a_context_is_ahead_of_both_directions():
    ids = torch.tensor([[0, 1, 4], [2, 3, 7]])
    scan = make_scan(Layout((2, 4), 3, ids, num_context=2), "raster", 0)
    assert scan.flip(torch.arange(6)[None]).tolist() == [[0, 1, 5, 4, 3, 2]]
    forward, backward = scan.gaps_both_ways()
    assert forward.tolist() == [[1, 1, 1, 1, 1, 3], [1, 1, 1, 3, 1, 4]]
    assert backward.tolist() == [[1, 1, 1, 3, 1, 1], [1, 1, 1, 4, 1, 3]]
    assert scan.segment_ids_both_ways()[1].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 2]]
    alone = make_scan(Layout((2, 4), 2, ids, num_context=2), "raster", 0)
    assert alone.gaps().tolist() == [[1, 1, 1, 1, 3], [1, 1, 1, 1, 4]]


def test_the_port_without_care_walks_in_no_order_that_depends_on_the_ids_alone():
    ids = some_ids(200, 12)
    walk = make_scan(Layout(GRID, 1, ids), "unsorted", 0)
    tokens = torch.cat([torch.full((200, 1), -1), ids], dim=1).double().unsqueeze(-1)
    walked = walk.permute(tokens).squeeze(-1).long()
    assert torch.equal(walk.restore(walk.permute(tokens)), tokens)
    assert (walked[:, 0] == -1).all()
    assert torch.equal(walked[:, 1:].sort(dim=1).values, ids)
    steps = torch.diff(walked[:, 1:], dim=1)
    assert 0.45 < (steps > 0).double().mean() < 0.55, "as often down as up"
    assert walk.gaps() is None
    other = make_scan(Layout(GRID, 1, ids), "unsorted", 3)
    assert torch.equal(other.take, walk.take), "all layers share it"
    assert make_scan(Layout(GRID, 1), "unsorted", 0).take is None, "dense: raster"


class CountsCopies(TorchDispatchMode):
    """Counts tensors that go from the CPU to another device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func):
            self.count += args[0].device.type == "cpu" != out.device.type
        return out


@pytest.mark.parametrize("order", ["serpentine", "serpentine8"])
def test_a_serpentine_is_made_where_the_tokens_are(order):
    layout = Layout(GRID, 0, torch.arange(8, device="meta").expand(2, -1))
    with CountsCopies() as copies:
        for index in range(8):
            assert make_scan(layout, order, index).take.device.type == "meta"
    assert copies.count == 0
