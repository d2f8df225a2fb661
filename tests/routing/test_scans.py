"""A walk over some tokens is the full walk with the others deleted, and is undone."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import ORDERS, inverse, make_scan, scan_order

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


@pytest.mark.parametrize(
    ("extra", "context", "forward", "backward"),
    [
        (0, 0, [[1, 1, 3], [1, 1, 4]], [[1, 3, 1], [1, 4, 1]]),
        (2, 0, [[1, 1, 1, 1, 3], [1, 1, 3, 1, 4]], [[1, 3, 1, 1, 1], [1, 4, 1, 3, 1]]),
        (2, 2, [[1, 1, 1, 1, 3], [1, 1, 1, 1, 4]], [[1, 1, 1, 3, 1], [1, 1, 1, 4, 1]]),
        (3, 2, [[1, 1, 1, 1, 1, 3], [1, 1, 1, 3, 1, 4]],
         [[1, 1, 1, 3, 1, 1], [1, 1, 1, 4, 1, 3]]),
    ],
)  # fmt: skip
def test_gaps_count_the_steps_of_the_full_walk(extra, context, forward, backward):
    """A context is ahead of both directions, and a neighbour of any token."""
    ids = torch.tensor([[0, 1, 4], [2, 3, 7]])
    scan = make_scan(Layout((2, 4), extra, ids, num_context=context), "raster", 0)
    assert [gaps.tolist() for gaps in scan.gaps()] == [forward, backward]
    for gaps, segments in zip(scan.gaps(), scan.segment_ids(), strict=True):
        assert torch.equal(segments, (gaps > 1).cumsum(1))
    places = torch.arange(extra + 3)
    expected = torch.cat([places[:context], places[context:].flip(0)])
    assert torch.equal(scan.flip(places[None])[0], expected)


def test_gaps_along_another_curve_and_of_no_route():
    turned = make_scan(Layout((2, 4), 0, torch.tensor([[3, 4, 7]])), "serpentine", 0)
    assert turned.gaps()[0].tolist() == [[1, 1, 3]]  # 0 1 2 3 7 6 5 4
    dense = make_scan(Layout((2, 4), 0), "serpentine", 0)
    assert dense.gaps() is dense.segment_ids() is None


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
