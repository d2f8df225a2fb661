import math

import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.rwkv7 import ChannelMix, TimeMix
from tests.backbones.test_rwkv import (
    GRID,
    NUM_TOKENS,
    make_ids,
    shift_on_the_grid,
    shift_over_gaps,
    walk_of,
)
from tests.backbones.test_scan_mixers import randomized, walks_of
from tread_zoo import create_backbone
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import Select

WIDTH, HEAD = 8, 4


def low(layers, x, activation):
    return activation(x @ layers[0].weight.T) @ layers[2].weight.T


def mix_by_loop(mixer, x, shifted, walks, first_value):
    """The time mix written out: one direction, one token, one head at a time."""
    r_blend, k_blend, v_blend, w_blend, a_blend, g_blend = (
        x * share + shifted * (1 - share) for share in mixer.own
    )
    r, k = r_blend @ mixer.receptance.weight.T, k_blend @ mixer.key.weight.T
    v = v_blend @ mixer.value.weight.T
    v = v + torch.sigmoid(low(mixer.mix, v_blend, lambda y: y) + mixer.mix_bias) * (first_value - v)
    rates = torch.sigmoid(low(mixer.rate, a_blend, lambda y: y) + mixer.rate_bias)
    decays = low(mixer.decay, w_blend, torch.tanh)
    written = k * (1 + mixer.replaced * (rates - 1))
    read = torch.zeros_like(v)
    for way, bias in enumerate(mixer.decay_bias):
        falls = -math.exp(-0.5) * torch.sigmoid(decays + bias)
        for b, path in enumerate(paths[way] for paths in walks):
            states = torch.zeros(WIDTH // HEAD, HEAD, HEAD, dtype=x.dtype)
            for step, (now, place) in enumerate(path):
                apart = abs(place - path[step - 1][1]) if step and mixer.gaps == "decay" else 1
                for head in range(WIDTH // HEAD):
                    part = slice(HEAD * head, HEAD * head + HEAD)
                    removed = F.normalize((k * mixer.removed)[b, now, part], dim=0)
                    transition = torch.exp(apart * falls[b, now, part]).diag()
                    transition -= torch.outer(rates[b, now, part] * removed, removed)
                    states[head] = transition @ states[head]
                    states[head] += torch.outer(written[b, now, part], v[b, now, part])
                    read[b, now, part] += states[head].T @ r[b, now, part]
    heads = read.unflatten(-1, (-1, HEAD))
    centred = heads - heads.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + HEAD * 1e-5).sqrt()
    y = normed.flatten(2) * mixer.norm.weight + mixer.norm.bias
    bonus = (r * mixer.bonus * written).unflatten(-1, (-1, HEAD)).sum(-1, keepdim=True)
    y = y + (bonus * v.unflatten(-1, (-1, HEAD))).flatten(2)
    return (y * low(mixer.gate, g_blend, torch.sigmoid)) @ mixer.output.weight.T


@pytest.mark.parametrize(
    ("gaps", "name", "kept", "context"),
    [
        ("decay", "raster", 7, 0),
        ("reset", "raster", 7, 0),
        ("ignore", "raster", 7, 0),
        ("decay", "hilbert", 7, 2),
        ("decay", "raster", NUM_TOKENS, 0),
    ],
)
@torch.no_grad()
def test_time_mix_equals_the_written_out_loop(gaps, name, kept, context):
    mixer = randomized(TimeMix(WIDTH, HEAD, 2, scan_order=name, index=3, gaps=gaps))
    ids = make_ids(kept=kept)
    x, first_value = torch.randn(2, 2, context + kept, WIDTH, dtype=torch.float64)
    shift = shift_over_gaps if gaps == "ignore" else shift_on_the_grid
    shifted = torch.cat([x[:, :context], shift(x[:, context:], ids)], dim=1)
    walks = walks_of(ids, name, 3, context, context, grid=GRID)
    expected = mix_by_loop(mixer, x, shifted, walks, first_value)
    ids = None if kept == NUM_TOKENS else ids
    layout = Layout(GRID, context, ids, batch=2, num_context=context)
    out, value = mixer(x, mixer.prepare(layout), first_value)
    torch.testing.assert_close(out, expected)
    assert value is None


@torch.no_grad()
def test_channel_mix_equals_the_formula():
    mix, ids = randomized(ChannelMix(8, 4.0)), make_ids()
    x = torch.randn(2, ids.shape[1], 8, dtype=torch.float64)
    blend = x * mix.own[0] + shift_on_the_grid(x, ids) * (1 - mix.own[0])
    expected = (blend @ mix.key.weight.T).clamp_min(0) ** 2 @ mix.value.weight.T
    torch.testing.assert_close(mix(x, walk_of(Layout(GRID, 0, ids))), expected)


@torch.no_grad()
def test_first_values_are_routed_with_their_tokens():
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 0, "hidden_size": 16}
    network = create_backbone("rwkv7_tiny", **sizes, depth=4, head_size=8)
    made, seen = [], []
    for block in network.blocks:
        block.mixer.register_forward_hook(
            lambda mixer, args, out: (made if mixer.is_first else seen).append((args[2], out[1]))
        )
    ids = torch.tensor([[0, 3, 7, 12], [1, 2, 5, 15]])
    network(torch.randn(2, 1, 8, 8), torch.rand(2), routes=[Select(1, 3, ids)])
    first = made[0][1]
    assert first.abs().min() > 0
    kept = first.gather(1, ids.unsqueeze(-1).expand(-1, -1, 16))
    for (value, _), expected in zip(seen, (kept, kept, first), strict=True):
        assert torch.equal(value, expected)
