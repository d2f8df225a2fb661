import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from tread_zoo.contract.layers import time_sinusoids
from tread_zoo.testing.conformance import Probe, watching

SMALL = {"hidden_size": 8, "depth": 4, "num_heads": 2}
EXTRA = 2


def make_probe(**overrides):
    return Probe("uvit_tiny", input_size=(4, 6), overrides={**SMALL, **overrides})


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / deviation * norm.weight + norm.bias


def block_by_formula(block, x, skip):
    """One block on the tokens [L, D] of one image, written out head by head."""
    width = x.shape[-1]
    if skip is not None:
        x = torch.cat([x, skip], -1) @ block.skip_proj.weight.T + block.skip_proj.bias
    q, k, v = (layer_norm(x, block.norm1) @ block.qkv.weight.T).split(width, -1)
    size, heads = width // block.num_heads, []
    for i in range(block.num_heads):
        part = slice(size * i, size * (i + 1))
        weights = torch.exp(q[:, part] @ k[:, part].T / math.sqrt(size))
        heads.append(weights / weights.sum(-1, keepdim=True) @ v[:, part])
    x = x + torch.cat(heads, -1) @ block.proj.weight.T + block.proj.bias
    h = layer_norm(x, block.norm2) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    h = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    return x + h @ block.mlp.fc2.weight.T + block.mlp.fc2.bias


def run_by_formula(backbone, inputs, routes):
    """The routed stack [B, E + N, D], written out from what routing means.

    Every token always has a value. A block updates the values of the tokens that it sees. Its skip
    holds the values of all tokens at that time, also of tokens that it did not see.
    """
    done = []
    for b, tokens in enumerate(backbone.embed(*inputs)[0][0]):
        now, skips = tokens, {}
        for index, block in enumerate(backbone.blocks):
            seen = list(range(len(now)))
            for route in routes:
                if route.start <= index < route.end:
                    seen = [*range(EXTRA), *(EXTRA + i for i in route.ids[b].tolist())]
            skip = None
            if index > len(backbone.blocks) // 2:
                skip = skips[len(backbone.blocks) - 1 - index][seen]
            now = now.clone()
            now[seen] = block_by_formula(block, now[seen], skip)
            skips[index] = now
        done.append(now)
    return torch.stack(done)


@torch.no_grad()
def assert_equals_formula(probe, backbone, routes):
    x, t, y = probe.inputs()
    inputs = (x.double(), t.double(), y)
    with watching(backbone) as seen:
        out = backbone(*inputs, routes=routes)
    expected = run_by_formula(backbone, inputs, routes)
    if not any(route.end == backbone.num_blocks for route in routes):
        torch.testing.assert_close(seen[-1].after[0], expected)
    torch.testing.assert_close(out, backbone.head((expected,), None))


@pytest.mark.parametrize("depth", [2, 4, 6])
def test_every_route_equals_the_formula(depth):
    """Wherever a route cuts the skips, each carries the tokens of its consumer."""
    probe = make_probe(depth=depth)
    backbone = probe.build().double()
    assert_equals_formula(probe, backbone, [])
    for start, end in itertools.combinations(range(backbone.num_blocks + 1), 2):
        assert_equals_formula(probe, backbone, [probe.route(backbone, start, end, rate=0.5)])


def test_every_two_routes_equal_the_formula():
    """A skip made in one route and consumed in another included."""
    probe = make_probe()
    backbone = probe.build().double()
    bounds, across = range(backbone.num_blocks + 1), 0
    for (a, b), (c, d) in itertools.product(itertools.combinations(bounds, 2), repeat=2):
        if c < b:
            continue
        one, two = probe.route(backbone, a, b, 0.5), probe.route(backbone, c, d, 0.25, seed=1)
        assert_equals_formula(probe, backbone, [one, two])
        across += any(a <= i < b and c <= j < d for j, i in backbone.skips.items())
    assert across > 0


def test_label_and_time_stand_ahead_and_are_never_routed():
    probe = make_probe()
    backbone = probe.build()
    x, t, y = probe.inputs()
    sinusoids = time_sinusoids(t, 8, 1000.0)
    tokens = backbone.embed(x, t, y)[0][0]
    torch.testing.assert_close(
        tokens[:, 0], backbone.label_embed.table.weight[y] + backbone.positions[0]
    )
    torch.testing.assert_close(tokens[:, 1], sinusoids + backbone.positions[1])
    route = probe.route(backbone, 0, backbone.num_blocks, rate=0.75)
    with watching(backbone) as seen:
        backbone(x, t, y, routes=[route])
    for call in seen:
        assert call.before[0].shape[1] == EXTRA + route.num_kept
    assert torch.equal(seen[0].before[0][:, :EXTRA], tokens[:, :EXTRA])


def test_convolution_comes_after_the_patches_are_joined():
    backbone = make_probe().build()
    torch.manual_seed(0)
    backbone.conv.reset_parameters()  # at random: it starts as the identity
    tokens = torch.randn(2, EXTRA + 6, 8)
    changed = tokens.clone()
    changed[:, EXTRA] = torch.randn(2, 8)  # the patch of pixels (0 … 1, 0 … 1) of 4x6
    moved = backbone.head((tokens,), None) - backbone.head((changed,), None)
    reach = moved.abs().amax(dim=(0, 1)) > 0
    assert reach[:3, :3].all(), "one pixel beyond the patch"
    assert reach.sum() == 9
    joined = backbone.head((tokens,), None)
    conv, backbone.conv = backbone.conv, None
    without = backbone.head((tokens,), None)
    torch.testing.assert_close(F.conv2d(without, conv.weight, conv.bias, padding=1), joined)


def test_a_context_is_tokens_ahead_of_the_times():
    probe = make_probe().with_contexts()
    (x, t, y), backbone = probe.inputs(), probe.build()
    layer = backbone.context_embed
    with torch.no_grad():
        for given, full in ((y, y), (y.half(), y.half().float()), (None, torch.zeros_like(y))):
            tokens = backbone.embed(x, t, given)[0][0]
            assert tokens.shape == (len(x), 1 + 3 + 6, 8)
            expected = full @ layer.weight.T + layer.bias + backbone.context_positions
            torch.testing.assert_close(tokens[:, :3], expected)
            time = time_sinusoids(t, 8, 1000.0) + backbone.positions[0]
            torch.testing.assert_close(tokens[:, 3], time)
