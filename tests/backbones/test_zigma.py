import pytest
import torch
import torch.nn.functional as F

from tread_zoo import create_backbone
from tread_zoo.contract.backbone import Layout
from tread_zoo.routing import GAPS, inverse, scan_order

GRID = (3, 4)


def make_block(gaps, index):
    """Return block `index` of a network with all weights drawn."""
    torch.manual_seed(0)
    network = create_backbone(
        "zigma_tiny", input_size=8, in_channels=1, num_classes=0, hidden_size=8, depth=index + 1,
        gaps=gaps,
    ).double()  # fmt: skip
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network.blocks[index]


def block_by_loop(block, x, condition, places, gaps):
    """The formulas of the module written out for one sample: one token at a time along the walk.

    `places` are those of the tokens x [K, D] along the full curve.
    """
    walk = sorted(range(len(x)), key=places.__getitem__)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * block.norm.weight
    shift, scale, gate = block.modulation(condition).chunk(3)
    mixer, out = block.mixer, x + normed
    u, z = mixer.in_proj(normed * (1 + scale) + shift).chunk(2, -1)
    state = torch.zeros_like(mixer.A_log)
    for step, token in enumerate(walk):
        gap = places[token] - places[walk[step - 1]] if step else 1
        v = mixer.conv_bias
        for lag in range(min(4, step + 1)):
            before = walk[step - lag]
            if gaps == "ignore" or places[token] - places[before] == lag:
                v = v + mixer.conv_weight[:, 3 - lag] * u[before]
        v = F.silu(v)
        low, inp, read = mixer.select(v).split(mixer.parts)
        size = F.softplus(mixer.step_weight @ low + mixer.step_bias)[:, None]
        decay = torch.exp(-(gap if gaps == "decay" else 1) * size * mixer.A_log.exp())
        state = decay * state + size * v[:, None] * inp
        mixed = mixer.out_proj((state @ read + mixer.D * v) * F.silu(z[token]))
        out = out + F.one_hot(torch.tensor(token), len(x))[:, None] * gate * mixed
    return out


@pytest.mark.parametrize("gaps", GAPS)
@pytest.mark.parametrize("index", [0, 3, 6])
def test_a_block_equals_its_formulas_along_its_own_serpentine(index, gaps):
    block, rank = make_block(gaps, index), inverse(scan_order("serpentine8", GRID, index))
    condition = torch.randn(2, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2, 5, 6, 9], [1, 3, 4, 5, 10, 11]])
    for layout in (Layout(GRID, 0, ids), Layout(GRID, 0, batch=2)):
        positions = layout.positions()
        x = torch.randn(2, positions.shape[1], 8, dtype=torch.float64)
        with torch.no_grad():
            (out,) = block((x,), condition, block.prepare(layout))
            for b in range(2):
                places = rank[positions[b]].tolist()
                expected = block_by_loop(block, x[b], condition[b], places, gaps)
                torch.testing.assert_close(out[b], expected)
