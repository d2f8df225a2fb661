"""Linear attention without order: the mixer against its sum written out."""

import pytest
import torch

from backbones.mixers.linear_attention import LinearAttention
from tread_zoo.contract.backbone import Layout

GRID = (5, 7)
IDS = torch.tensor([[2, 3, 9, 17, 30], [0, 1, 14, 21, 34]])
LAYOUTS = [Layout(GRID, 0, batch=2), Layout(GRID, 0, IDS), Layout(GRID, 2, IDS, num_context=2)]


def make_mixer(**options):
    torch.manual_seed(0)
    mixer = LinearAttention(16, 2, **options).double()
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


def turned(z, place):
    """Turn pair i of each half by the row or the column times 10000^(-i / 2); heads of 8."""
    speed = 10000.0 ** -(torch.arange(2).double() / 2)
    angles = torch.cat([place[0] * speed, place[1] * speed])
    pairs = torch.view_as_complex(z.reshape(4, 2)) * torch.exp(1j * angles)
    return torch.view_as_real(pairs).flatten()


def mix_by_loop(mixer, x, layout):
    """Σ_j (R φ(q_i) · R φ(k_j)) v_j / Σ_j φ(q_i) · φ(k_j), one pair of tokens at a time."""
    q, k, v = (x @ mixer.qkv.weight.T + mixer.qkv.bias).split(16, dim=-1)
    q, k, mixed = q.relu(), k.relu(), torch.zeros_like(v)
    for b, ids in enumerate(layout.positions().tolist()):
        places = [(0, 0)] * layout.num_extra + [divmod(i, GRID[1]) for i in ids]
        for head in (slice(0, 8), slice(8, 16)):
            for i, place in enumerate(places):
                total = 0.0
                for j, other in enumerate(places):
                    one, two = q[b, i, head], k[b, j, head]
                    total += one @ two
                    if mixer.rotary:
                        one, two = turned(one, place), turned(two, other)
                    mixed[b, i, head] += (one @ two) * v[b, j, head]
                mixed[b, i, head] /= total + 1e-6 * len(places)
    return mixed @ mixer.proj.weight.T + mixer.proj.bias


@pytest.mark.slow
@pytest.mark.parametrize("rotary", [False, True])
@torch.no_grad()
def test_the_mixer_equals_the_sum_written_out(rotary):
    mixer = make_mixer(rotary=rotary)
    for layout in LAYOUTS:
        length = layout.num_extra + layout.positions().shape[1]
        x = torch.randn(2, length, 16, dtype=torch.float64, generator=torch.manual_seed(1))
        expected = mix_by_loop(mixer, x, layout)
        torch.testing.assert_close(mixer(x, mixer.prepare(layout)), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_sums_over_many_tokens_fit_into_half_precision():
    mixer = make_mixer().float()
    x = 3 * torch.randn(1, 4096, 16, generator=torch.manual_seed(1))
    layout = Layout((64, 64), 0)
    exact = mixer.double()(x.double(), mixer.prepare(layout))
    for dtype, bound in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        out = mixer.to(dtype)(x.to(dtype), mixer.prepare(layout))
        assert ((out.double() - exact).norm() / exact.norm()) < bound
        mixer.double()
