"""Gated linear attention: the mixer against its formula written out, and what it can learn."""

import pytest
import torch
import torch.nn.functional as F

from backbones.mixers.gla import BidirectionalGLA
from tests.backbones.test_gated_deltanet import convolve
from tests.backbones.test_mamba import check_against


def make_mixer(gaps="ignore", name="raster", index=0, short_conv=False):
    torch.manual_seed(0)
    mixer = BidirectionalGLA(8, 2, short_conv, scan_order=name, index=index, gaps=gaps).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def mix_by_loop(mixer, x, walks):
    """The mixer one direction, one step, one head at a time: 2 heads, keys of 2, values of 4."""
    u, z = (x @ mixer.in_proj.weight.T).split([16, 8], dim=-1)
    gates = x @ mixer.forget_in.weight.T @ mixer.forget_out.weight.T + mixer.forget_out.bias
    decays = gates.sigmoid() ** (1 / 16)
    total = torch.zeros_like(z)
    for b, paths in enumerate(walks):
        for way, path in enumerate(paths):
            for head in range(2):
                keys = slice(2 * head, 2 * head + 2)
                values = slice(4 * head, 4 * head + 4)
                state = torch.zeros(2, 4, dtype=x.dtype)
                for step, (now, place) in enumerate(path):
                    gap = abs(place - path[step - 1][1]) if step else 1
                    decay = decays[b, now, 4 * way :][keys]
                    if mixer.gaps == "decay":
                        decay = decay**gap
                    mixed = convolve(mixer, u, b, way, path, step) if mixer.conv else u[b, now]
                    q, k, v = mixed.split([4, 4, 8])
                    state = decay[:, None] * state + k[keys, None] * v[values]
                    total[b, now, values] += q[keys] @ state / 2**0.5
    heads = total.unflatten(-1, (2, 4))
    normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight
    return (normed.flatten(2) * F.silu(z)) @ mixer.out_proj.weight.T


@pytest.mark.parametrize(
    ("gaps", "short_conv"),
    [("ignore", False), ("decay", False), ("ignore", True), ("reset", True), ("decay", True)],
)
@pytest.mark.parametrize("name", ["raster", "hilbert", "serpentine8"])
def test_mixer_equals_the_written_out_loop(name, gaps, short_conv):
    check_against(mix_by_loop, make_mixer(gaps, name, 3, short_conv), name)
