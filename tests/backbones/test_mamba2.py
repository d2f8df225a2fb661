import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.ssd import BidirectionalSSD
from tests.backbones.test_mamba import check_against
from tread_zoo.routing import GAPS, ORDERS


def make_mixer(gaps="ignore", name="raster", index=0):
    torch.manual_seed(0)
    sizes = {"expand": 2, "state_size": 3, "head_size": 4, "conv_width": 4}
    mixer = BidirectionalSSD(8, **sizes, scan_order=name, index=index, gaps=gaps).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def mix_by_loop(mixer, x, walks):
    """The mixer written out: one direction, one step, one head at a time.

    Inner width 16 in 4 heads of 4, 3 states; the first projection gives z, (inputs, B, C), steps.
    """
    z, u, steps = (x @ mixer.in_proj.weight.T).split([16, 22, 4], dim=-1)
    total = torch.zeros_like(z)
    for way in range(2):
        weight, bias = mixer.conv_weight[22 * way :][:22], mixer.conv_bias[22 * way :][:22]
        own = slice(4 * way, 4 * way + 4)
        rates, skips = -mixer.A_log[own].exp(), mixer.D[own]
        for b, path in enumerate(paths[way] for paths in walks):
            states = torch.zeros(4, 4, 3, dtype=x.dtype)
            for step, (now, place) in enumerate(path):
                gap = abs(place - path[step - 1][1]) if step and mixer.gaps == "decay" else 1
                v = bias.clone()
                for lag in range(min(4, step + 1)):
                    before, there = path[step - lag]
                    if mixer.gaps == "ignore" or abs(place - there) == lag:
                        v = v + weight[:, 3 - lag] * u[b, before]
                inputs, inward, outward = F.silu(v).split([16, 3, 3])
                sizes = F.softplus(steps[b, now] + mixer.step_bias[own])
                for head in range(4):
                    fed = inputs[4 * head : 4 * head + 4]
                    decay = torch.exp(gap * sizes[head] * rates[head])
                    states[head] = decay * states[head] + sizes[head] * fed[:, None] * inward
                    y = states[head] @ outward + skips[head] * fed
                    total[b, now, 4 * head : 4 * head + 4] += y
    gated = total * F.silu(z)
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    return normed @ mixer.out_proj.weight.T


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("name", ORDERS)
def test_mixer_equals_the_written_out_loop(name, gaps):
    check_against(mix_by_loop, make_mixer(gaps, name, index=3), name)
