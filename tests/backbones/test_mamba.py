from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.scan import softplus
from backbones.mixers.selective_scan import SelectiveScan
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import GAPS, ORDERS, inverse, scan_order

GRID = (3, 4)


def make_mixer(gaps="ignore", name="raster", index=0):
    torch.manual_seed(0)
    mixer = SelectiveScan(
        8, expand=2, state_size=3, conv_width=4, scan_order=name, index=index, gaps=gaps
    ).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def walks_of(ids, name, index, num_extra, num_context, grid=GRID):
    """Return, for each sample, (token, place along the full curve) in the order of the walk, and of
    the walk backwards. A context, the first of the extra tokens, is a step ahead of either."""
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


@torch.no_grad()
def check_against(loop, mixer, name):
    """Hold a mixer of index 3 and width 8 against a loop over its walks, routed and dense."""
    ids = torch.tensor([[0, 1, 2, 5, 6, 9], [1, 3, 4, 5, 10, 11]])
    for extra, context, kept in ((0, 0, ids), (2, 0, None), (3, 2, ids)):
        layout = Layout(GRID, extra, kept, batch=2, num_context=context)
        places = layout.positions()
        x = torch.randn(2, extra + places.shape[1], 8, dtype=torch.float64)
        expected = loop(mixer, x, walks_of(places, name, 3, extra, context))
        torch.testing.assert_close(mixer(x, mixer.prepare(layout)), expected)


def mix_by_loop(mixer, x, walks):
    """The mixer written out: one direction, one step, one channel at a time."""
    inner, size = mixer.inner, mixer.state_size
    u, z = (x @ mixer.in_proj.weight.T).chunk(2, -1)
    total = torch.zeros_like(u)
    for way in range(2):
        own = slice(way * inner, (way + 1) * inner)
        for b, path in enumerate(paths[way] for paths in walks):
            state = torch.zeros(inner, size, dtype=x.dtype)
            for step, (now, place) in enumerate(path):
                gap = abs(place - path[step - 1][1]) if step else 1
                v = mixer.conv_bias[own].clone()
                for lag in range(min(4, step + 1)):
                    before, there = path[step - lag]
                    if mixer.gaps != "ignore" and abs(place - there) != lag:
                        continue
                    v = v + mixer.conv_weight[own, 3 - lag] * u[b, before]
                v = F.silu(v)
                low, inp, out = (mixer.select[way] @ v).split([mixer.step_rank, size, size])
                step_size = F.softplus(mixer.step_weight[way] @ low + mixer.step_bias[own])
                length = gap if mixer.gaps == "decay" else 1
                decay = torch.exp(-length * step_size[:, None] * mixer.A_log[own].exp())
                state = decay * state + (step_size * v)[:, None] * inp
                total[b, now] = total[b, now] + state @ out + mixer.D[own] * v
    return (total * F.silu(z)) @ mixer.out_proj.weight.T


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("name", ORDERS)
def test_mixer_equals_the_written_out_loop(name, gaps):
    check_against(mix_by_loop, make_mixer(gaps, name, index=3), name)


def test_softplus_and_its_gradient_are_those_of_float64():
    x = torch.linspace(-80, 800, 8801, requires_grad=True)
    y = softplus(x)
    y.sum().backward()
    with torch.no_grad():
        exact = torch.logaddexp(x.double(), torch.zeros((), dtype=torch.float64))
        torch.testing.assert_close(y.double(), exact, rtol=6e-8, atol=1e-37)
        torch.testing.assert_close(x.grad.double(), x.double().sigmoid(), rtol=3e-7, atol=1e-37)
