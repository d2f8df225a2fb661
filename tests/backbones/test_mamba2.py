import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.ssd import BidirectionalSSD
from tests.backbones.test_mamba import walks_of
from tread_zoo import create_backbone
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import GAPS, ORDERS

GRID = (3, 4)
SIZES = {"input_size": 8, "in_channels": 1, "num_classes": 10}
SMALL = {"hidden_size": 16, "depth": 4, "expand": 2, "state_size": 4, "head_size": 8}


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
    mixer = make_mixer(gaps, name, index=3)
    ids = torch.tensor([[0, 1, 2, 5, 6, 9], [1, 3, 4, 5, 10, 11]])
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        expected = mix_by_loop(mixer, x, walks_of(ids, name, 3))
        torch.testing.assert_close(mixer(x, mixer.prepare(Layout(GRID, 2, ids))), expected)
        every = torch.arange(12).expand(2, -1)
        x = torch.randn(2, 14, 8, dtype=torch.float64)
        expected = mix_by_loop(mixer, x, walks_of(every, name, 3))
        torch.testing.assert_close(mixer(x, mixer.prepare(Layout(GRID, 2, batch=2))), expected)
        expected = mix_by_loop(mixer, x[:, :9], walks_of(ids, name, 3, 3, num_context=2))
        layout = Layout(GRID, 3, ids, num_context=2)
        torch.testing.assert_close(mixer(x[:, :9], mixer.prepare(layout)), expected)


def test_block_joins_the_skip_and_adds_to_the_residual():
    backbone = create_backbone("mamba2_tiny", **SIZES, **SMALL).double()
    block = backbone.blocks[-1]
    scan = block.prepare(Layout(GRID, 2))
    delta, residual, skip = torch.randn(3, 2, 14, 16, dtype=torch.float64)
    after, whole = block((delta, residual), scan, skip)
    weight, bias = block.skip_proj.weight, block.skip_proj.bias
    joined = residual + delta @ weight[:, :16].T + skip @ weight[:, 16:].T + bias
    torch.testing.assert_close(whole, joined)
    normed = joined / (joined.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(after, block.mixer(normed, scan))


@torch.no_grad()
def test_initial_steps_and_rates_follow_the_table():
    backbone = create_backbone("mamba2_tiny", **SIZES, state_size=8, expand=2, head_size=4)
    mixers = [block.mixer for block in backbone.blocks]
    steps = F.softplus(torch.cat([mixer.step_bias for mixer in mixers]))
    assert 0.00099 < steps.min() < 0.0012
    assert 0.085 < steps.max() < 0.101
    rates = torch.cat([mixer.A_log for mixer in mixers]).exp()
    assert 1 <= rates.min() < 1.2
    assert 15.8 < rates.max() <= 16
    assert rates.mean() == pytest.approx(8.5, rel=0.05)
    for mixer in mixers:
        assert torch.equal(mixer.D, torch.ones_like(mixer.D))
        assert torch.equal(mixer.conv_bias, torch.zeros_like(mixer.conv_bias))
        bound = 1 / (mixer.out_proj.in_features * len(mixers)) ** 0.5
        assert 0.9 * bound < mixer.out_proj.weight.abs().max() <= bound
