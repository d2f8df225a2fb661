"""Every scanning mixer against its formulas, written out one direction and one step at a time."""

from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.delta import BidirectionalDelta, KimiDelta
from backbones.mixers.gla import BidirectionalGLA
from backbones.mixers.selective_scan import OneWayScan, SelectiveScan
from backbones.mixers.ssd import BidirectionalSSD
from tread_zoo import create_backbone
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import GAPS, ORDERS, inverse, scan_order

GRID, HEADS = (3, 4), 2
IDS = torch.tensor([[0, 1, 2, 5, 6, 9], [1, 3, 4, 5, 10, 11]])
SIZES = {"expand": 2, "state_size": 3, "conv_width": 4}


def randomized(module):
    torch.manual_seed(0)
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module


def walks_of(ids, name, index, num_extra, num_context, grid=GRID):
    """Return, for each sample, (token, position along the full curve) in the order of the walk,
    and the same for the backward walk. A context, the first extra token, is one step before
    both."""
    rank = inverse(scan_order(name, grid, index))
    ahead = [(i, i - num_extra) for i in range(num_context, num_extra)]
    walks = []
    for row in ids.tolist():
        tokens = ((num_extra + i, int(rank[p])) for i, p in enumerate(row))
        there = ahead + sorted(tokens, key=itemgetter(1))
        walks.append([])
        for way, sign in ((there, 1), (there[::-1], -1)):
            first = way[0][1]
            context = [(i, first + sign * (i - num_context)) for i in range(num_context)]
            walks[-1].append(context + way)
    return walks


def steps_of(mixer, walks):
    """Return (direction, sample, walk so far, length of the previous step) for every step."""
    for b, paths in enumerate(walks):
        for way, path in enumerate(paths[: getattr(mixer, "ways", 2)]):
            for step, (_, place) in enumerate(path):
                apart = abs(place - path[step - 1][1]) if step and mixer.gaps == "decay" else 1
                yield way, b, path[: step + 1], apart


def convolve(mixer, taps, u, path):
    """Return the convolution, with `taps` [C, 4], of u [L, C] at the end of a walk."""
    total = torch.zeros_like(u[0])
    for lag, (before, place) in enumerate(path[::-1][:4]):
        if mixer.gaps == "ignore" or abs(path[-1][1] - place) == lag:
            total = total + taps[:, 3 - lag] * u[before]
    return total


def by_head(total, norm, eps=1e-6):
    heads = total.unflatten(-1, (HEADS, -1))
    return (heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt() * norm.weight).flatten(2)


def selective_scan(mixer, x, walks):
    inner = mixer.inner
    u, z = (x @ mixer.in_proj.weight.T).chunk(2, -1)
    total, select = torch.zeros_like(u), mixer.select
    one_way = mixer.ways == 1  # its weights are those of one direction
    for way, b, path, apart in steps_of(mixer, walks):
        now, own = path[-1][0], slice(way * inner, (way + 1) * inner)
        if len(path) == 1:
            state = torch.zeros(inner, mixer.state_size, dtype=x.dtype)
        v = F.silu(convolve(mixer, mixer.conv_weight[own], u[b], path) + mixer.conv_bias[own])
        low, inp, out = ((select.weight if one_way else select[way]) @ v).split(mixer.parts)
        step_weight = mixer.step_weight if one_way else mixer.step_weight[way]
        size = F.softplus(step_weight @ low + mixer.step_bias[own])[:, None]
        state = torch.exp(-apart * size * mixer.A_log[own].exp()) * state + size * v[:, None] * inp
        total[b, now] += state @ out + mixer.D[own] * v
    return (total * F.silu(z)) @ mixer.out_proj.weight.T


def ssd(mixer, x, walks):
    """Inner width 16 in 4 heads of 4, 3 states; the first projection is z, (inputs, B, C),
    steps."""
    z, u, steps = (x @ mixer.in_proj.weight.T).split([16, 22, 4], dim=-1)
    total = torch.zeros_like(z)
    for way, b, path, apart in steps_of(mixer, walks):
        now, own, mixed = path[-1][0], slice(4 * way, 4 * way + 4), slice(22 * way, 22 * way + 22)
        if len(path) == 1:
            states = torch.zeros(4, 4, 3, dtype=x.dtype)
        v = convolve(mixer, mixer.conv_weight[mixed], u[b], path) + mixer.conv_bias[mixed]
        inputs, inward, outward = F.silu(v).split([16, 3, 3])
        inputs, sizes = inputs.view(4, 4), F.softplus(steps[b, now] + mixer.step_bias[own])
        decays = torch.exp(-apart * sizes * mixer.A_log[own].exp())
        fed = (sizes[:, None] * inputs)[..., None] * inward
        states = decays[:, None, None] * states + fed
        total[b, now] += (states @ outward + mixer.D[own][:, None] * inputs).flatten()
    gated = total * F.silu(z)
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    return normed @ mixer.out_proj.weight.T


def projected(mixer, u, way, b, path, raw):
    """Return q, k and v at the end of a walk, convolved if the mixer has a convolution, else
    `raw`."""
    if mixer.conv is None:
        return raw(u[b, path[-1][0]])
    return F.silu(convolve(mixer, mixer.conv.weight.unflatten(0, (2, -1))[way], u[b], path))


def gla(mixer, x, walks):
    """2 heads, keys of 2, values of 4."""
    u, z = (x @ mixer.in_proj.weight.T).split([16, 8], dim=-1)
    gates = x @ mixer.forget_in.weight.T @ mixer.forget_out.weight.T + mixer.forget_out.bias
    decays, total = gates.sigmoid() ** (1 / 16), torch.zeros_like(z)
    for way, b, path, apart in steps_of(mixer, walks):
        now = path[-1][0]
        if len(path) == 1:
            states = torch.zeros(HEADS, 2, 4, dtype=x.dtype)
        q, k, v = projected(mixer, u, way, b, path, lambda raw: raw).split([4, 4, 8])
        q, k, v = q.view(2, 2), k.view(2, 2), v.view(2, 4)
        decay = decays[b, now, 4 * way :][:4].view(2, 2, 1) ** apart
        states = decay * states + k[..., None] * v[:, None]
        total[b, now] += torch.einsum("hk,hkv->hv", q, states).flatten() / 2**0.5
    return (by_head(total, mixer.norm) * F.silu(z)) @ mixer.out_proj.weight.T


def delta(mixer, x, walks):
    """2 heads of 4 channels."""
    u = x @ mixer.in_proj.weight[:24].T
    beta = F.linear(x, mixer.beta_proj.weight).sigmoid()
    down = x if mixer.step_down is None else mixer.step_down(x)
    steps = F.softplus(F.linear(down, mixer.step_proj.weight) + mixer.step_bias)
    steps = steps.unflatten(-1, (2, HEADS, -1))  # one for a head, or one for each channel
    total = torch.zeros_like(x)
    for way, b, path, apart in steps_of(mixer, walks):
        now = path[-1][0]
        if len(path) == 1:
            states = torch.zeros(HEADS, 4, 4, dtype=x.dtype)
        q, k, v = projected(mixer, u, way, b, path, F.silu).view(3, HEADS, 4)
        q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
        rates = mixer.A_log.exp().view(2, HEADS, 1)[way]
        states = torch.exp(-rates * steps[b, now, way] * apart)[..., None] * states
        error = v - torch.einsum("hk,hkv->hv", k, states)
        strength = beta[b, now].view(2, HEADS)[way][:, None, None]
        states = states + strength * k[..., None] * error[:, None]
        total[b, now] += torch.einsum("hk,hkv->hv", q, states).flatten() / 2
    if isinstance(mixer, KimiDelta):
        up = mixer.gate_up
        gate = torch.sigmoid(x @ mixer.gate_down.weight.T @ up.weight.T + up.bias)
    else:
        gate = F.silu(x @ mixer.in_proj.weight[24:].T)
    eps = 1e-5 if isinstance(mixer, KimiDelta) else 1e-6
    return F.linear(by_head(total, mixer.norm, eps) * gate, mixer.out_proj.weight)


CONV = {"short_conv": True}
MIXERS = {
    "mamba": (SelectiveScan, SIZES, selective_scan),
    "zigma": (OneWayScan, SIZES, selective_scan),
    "mamba2": (BidirectionalSSD, {**SIZES, "head_size": 4}, ssd),
    "gla": (BidirectionalGLA, {}, gla),
    "gla, convolved": (BidirectionalGLA, CONV, gla),
    "delta": (BidirectionalDelta, {}, delta),
    "delta, per channel": (BidirectionalDelta, {"per_channel": True}, delta),
    "delta, convolved": (BidirectionalDelta, CONV, delta),
    "kda": (KimiDelta, {}, delta),
    "kda, convolved": (KimiDelta, CONV, delta),
}


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("kind", MIXERS)
@torch.no_grad()
def test_a_mixer_equals_its_formulas(kind, name, gaps):
    """Routed, dense with two extra tokens, and routed behind a context."""
    cls, options, loop = MIXERS[kind]
    heads = {"num_heads": HEADS} if "num_heads" in cls.__signature__.parameters else {}
    if gaps == "reset" and heads and options != CONV:
        with pytest.raises(ValueError, match="short_conv"):
            cls(8, **heads, **options, gaps=gaps)
        return
    mixer = randomized(cls(8, **heads, **options, scan_order=name, index=3, gaps=gaps))
    for extra, context, ids in ((0, 0, IDS), (2, 0, None), (3, 2, IDS)):
        layout = Layout(GRID, extra, ids, batch=2, num_context=context)
        places = layout.positions()
        x = torch.randn(2, extra + places.shape[1], 8, dtype=torch.float64)
        expected = loop(mixer, x, walks_of(places, name, 3, extra, context))
        torch.testing.assert_close(mixer(x, mixer.prepare(layout)), expected)


def test_kda_has_no_option_for_what_makes_it_kda():
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "depth": 2}
    with pytest.raises(ValueError, match="per_channel"):
        create_backbone("kda_tiny", **sizes, per_channel=False)
