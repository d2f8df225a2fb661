"""The shell of the scans, with the mixer that the guide writes."""

import re
from pathlib import Path

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs/adding_a_backbone.md"
IMPORTS = """
import torch
from torch import nn
"""
SIZES = {"input_size": 8, "in_channels": 1, "num_classes": 10, "hidden_size": 8, "depth": 4}


@pytest.fixture(scope="module")
def guide():
    """Return the names that the guide's code defines."""
    (code,) = re.findall(r"```python\n(from backbones.mixers.scan.*?)```", GUIDE.read_text(), re.S)
    names = {"__name__": "guide"}
    exec(IMPORTS + code, names)
    return names


@pytest.fixture
def network(guide):
    torch.manual_seed(0)
    network = guide["Mean"](**SIZES)
    for parameter in network.final.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return network.double()


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 1, 8, 8, generator=generator, dtype=torch.float64)
    return x, torch.tensor([0.2, 0.7], dtype=torch.float64), torch.tensor([3, 10])


def test_a_network_of_the_guide_by_its_formula(network):
    """Two streams, skips and tokens ahead, written out for a network on all its tokens."""
    x, t, y = inputs()
    time, label = network.time_embed(t), network.label_embed(y, 2)
    patches = x.view(2, 1, 4, 2, 4, 2).permute(0, 2, 4, 1, 3, 5).reshape(2, 16, 4)
    patches = patches @ network.patch_embed.weight.T + network.patch_embed.bias
    delta = torch.cat([label[:, None], time[:, None], patches], dim=1) + network.positions
    residual, made = torch.zeros_like(delta), {}
    for i, block in enumerate(network.blocks):
        if i > 2:
            delta = block.skip_proj(torch.cat([delta, made[4 - i]], dim=-1))
        residual = residual + delta
        normed = block.norm(residual)
        means = [normed[:, : n + 1].mean(1) + normed[:, n:].mean(1) for n in range(18)]
        means = torch.stack(means, dim=1)
        delta = made[i] = means @ block.mixer.linear.weight.T + block.mixer.linear.bias
    condition = torch.nn.functional.silu(time + label)
    out = network.final(network.norm(residual + delta)[:, 2:], condition)
    expected = out.view(2, 4, 4, 2, 2).permute(0, 1, 3, 2, 4).reshape(2, 1, 8, 8)
    torch.testing.assert_close(network(x, t, y), expected)


def test_what_it_depends_on_follows_from_the_order(guide):
    assert guide["Mean"](**SIZES).depends_on == ("order",)
    assert guide["Mean"](**SIZES, scan_order="hilbert").depends_on == ("order", "ids", "grid")
