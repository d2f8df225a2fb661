import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.q_shift import find_neighbours, q_shift
from backbones.mixers.wkv import ChannelMix, SpatialMix
from tests.backbones.test_scan_mixers import randomized
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import GAPS, ORDERS, Select, inverse, num_kept_tokens, scan_order
from tread_zoo.testing.conformance import Probe

GRID = (3, 5)
NUM_TOKENS = 15
QUARTER = num_kept_tokens(NUM_TOKENS, 0.75)
SMALL = {"hidden_size": 16, "depth": 5}
# Where the four quarters of the channels come from: left, right, up, down.
OFFSETS = ((0, -1), (0, 1), (-1, 0), (1, 0))


def make_ids(batch=2, kept=QUARTER, seed=0, num_tokens=NUM_TOKENS):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(batch, num_tokens, generator=generator)
    return scores.argsort(dim=1)[:, :kept].sort(dim=1).values


def walk_of(layout):
    """Return the part of a layout that the mixers use."""
    return SpatialMix(8).prepare(layout)


def shift_on_the_grid(x, ids=None):
    """Scatter into zeros, shift on the grid, gather; `q_shift` uses a table instead."""
    batch, _, width = x.shape
    height, columns = GRID
    full = x
    if ids is not None:
        index = ids.unsqueeze(-1).expand(-1, -1, width)
        full = torch.zeros(batch, NUM_TOKENS, width, dtype=x.dtype).scatter(1, index, x)
    image = F.pad(full.view(batch, height, columns, 4, width // 4), (0, 0, 0, 0, 1, 1, 1, 1))
    parts = [
        image[:, 1 + down : 1 + down + height, 1 + right : 1 + right + columns, i]
        for i, (down, right) in enumerate(OFFSETS)
    ]
    shifted = torch.cat(parts, dim=-1).view(batch, NUM_TOKENS, width)
    return shifted if ids is None else shifted.gather(1, index)


def test_channel_mix_equals_the_formula():
    mix = randomized(ChannelMix(8, 4.0))
    ids = make_ids()
    x = torch.randn(2, QUARTER, 8, dtype=torch.float64)
    shifted = shift_on_the_grid(x, ids)
    r, k = (x * own + shifted * (1 - own) for own in mix.own)
    keys = (k @ mix.key.weight.T).clamp_min(0) ** 2
    expected = torch.sigmoid(r @ mix.receptance.weight.T) * (keys @ mix.value.weight.T)
    torch.testing.assert_close(mix(x, walk_of(Layout(GRID, 0, ids))), expected)


@pytest.mark.parametrize("kept", [None, NUM_TOKENS, 8, QUARTER, 1])
def test_q_shift_equals_scatter_shift_gather_to_the_bit(kept):
    ids = None if kept is None else make_ids(batch=3, kept=kept)
    x = torch.randn(3, kept or NUM_TOKENS, 12, requires_grad=True)
    ours, expected = (
        q_shift(x, find_neighbours(Layout(GRID, 0, ids, batch=len(x)))),
        shift_on_the_grid(x, ids),
    )
    assert torch.equal(ours, expected)
    weight = torch.randn_like(x)
    assert torch.equal(*(torch.autograd.grad((y * weight).sum(), x)[0] for y in (ours, expected)))


def shift_over_gaps(x, ids):
    """The shift from the nearest token present in each direction, found by walking there."""
    shifted = torch.zeros_like(x)
    width = x.shape[-1] // 4
    for b, places in enumerate(ids.tolist()):
        for i, place in enumerate(places):
            for quarter, (down, right) in enumerate(OFFSETS):
                row, column = divmod(place, GRID[1])
                row, column = row + down, column + right
                while 0 <= row < GRID[0] and 0 <= column < GRID[1]:
                    if row * GRID[1] + column in places:
                        part = slice(quarter * width, (quarter + 1) * width)
                        shifted[b, i, part] = x[b, places.index(row * GRID[1] + column), part]
                        break
                    row, column = row + down, column + right
    return shifted


@pytest.mark.parametrize(("kept", "context"), [(NUM_TOKENS, 0), (7, 0), (7, 2)])
@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("name", ORDERS)
def test_every_order_and_every_way_with_gaps_by_pairs(name, gaps, kept, context):
    """The mix from its formula: distances along the curve, among the tokens present or all. A
    context has neither neighbours nor a place; it is at both ends of the curve."""
    index, ids = 3, make_ids(kept=kept)
    mix = randomized(SpatialMix(8, scan_order=name, index=index, gaps=gaps))
    x = torch.randn(2, context + kept, 8, dtype=torch.float64)
    shift = shift_over_gaps if gaps == "ignore" else shift_on_the_grid
    shifted = torch.cat([x[:, :context], shift(x[:, context:], ids)], dim=1)
    r, k, v = (
        (x * own + shifted * (1 - own)) @ layer.weight.T
        for own, layer in zip(mix.own, (mix.receptance, mix.key, mix.value), strict=True)
    )
    places = inverse(scan_order(name, GRID, index))[ids]
    if gaps != "decay":
        places = places.argsort(dim=1).argsort(dim=1)  # counted among the tokens present
    ahead = torch.arange(-context, 0).expand(2, -1)
    behind = (NUM_TOKENS if gaps == "decay" else kept) - 1 - ahead
    places = torch.cat([ahead, places, behind], dim=1)
    k, v = (torch.cat([each, each[:, :context]], dim=1) for each in (k, v))
    apart = (places.unsqueeze(1) - places.unsqueeze(2)).abs().unsqueeze(-1)
    logits = k.unsqueeze(1) - (apart - 1) * mix.decay / (NUM_TOKENS + 2 * context)
    own = torch.eye(k.shape[1], dtype=torch.bool).unsqueeze(-1)
    logits = torch.where(own, (mix.bonus + k).unsqueeze(1), logits)
    mean = (logits.softmax(dim=2) * v.unsqueeze(1)).sum(dim=2)[:, : x.shape[1]]
    expected = (torch.sigmoid(r) * mean) @ mix.output.weight.T
    ids = None if kept == NUM_TOKENS else ids
    layout = Layout(GRID, context, ids, batch=2, num_context=context)
    torch.testing.assert_close(mix(x, mix.prepare(layout)), expected)


def test_the_nearest_present_is_mutual_so_gradients_are_gathers():
    ids = make_ids(batch=3, kept=6)
    x = torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=True)
    near = find_neighbours(Layout(GRID, 0, ids), over_gaps=True)
    torch.testing.assert_close(q_shift(x, near), shift_over_gaps(x, ids))
    assert torch.autograd.gradcheck(lambda y: q_shift(y, near), (x,))


def test_far_tokens_stay_finite():
    """Decays so strong that the whole sequence lies beyond the smallest float."""
    backbone = Probe("rwkv_tiny", input_size=(32, 32), overrides=SMALL).build()
    for block in backbone.blocks:
        torch.nn.init.constant_(block.spatial.decay, 1e5)
    x, t, y = Probe("rwkv_tiny", input_size=(32, 32)).inputs()
    ids = make_ids(batch=3, kept=64, num_tokens=256)
    out = backbone(x, t, y, routes=[Select(1, 4, ids)])
    out.square().mean().backward()
    assert torch.isfinite(out).all()
    for parameter in backbone.parameters():
        assert torch.isfinite(parameter.grad).all()


def test_skips_join_the_first_half_to_the_second():
    backbone = Probe("rwkv_tiny", overrides={"hidden_size": 16, "depth": 7}).build()
    assert backbone.skips == {6: 0, 5: 1, 4: 2}
    has_skip = [block.skip_proj is not None for block in backbone.blocks]
    assert has_skip == [False] * 4 + [True] * 3
    x, condition = torch.randn(3, 24, 16), torch.randn(3, 16)
    layout, skip = Layout(backbone.grid, 0, batch=3), torch.randn(3, 24, 16)
    block = backbone.blocks[4]
    walk = block.prepare(layout)
    joined = block.skip_proj(torch.cat([x, skip], dim=-1))
    linear, block.skip_proj = block.skip_proj, None
    expected = block(joined, condition, walk, None)
    block.skip_proj = linear
    assert torch.equal(block(x, condition, walk, skip), expected)
