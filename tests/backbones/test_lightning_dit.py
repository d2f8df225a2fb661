import pytest
import torch

from backbones.mixers.rotary import RotaryAttention
from tread_zoo.contract.backbone import Layout
from tread_zoo.contract.layers import rotate

GRID = (5, 7)


def mixer(**options):
    torch.manual_seed(0)
    attention = RotaryAttention(32, 2, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.normal_(std=0.5)
    return attention


def mixed_by(attention, x, layout):
    return attention(x, attention.prepare(layout))


def kept(rows, cols):
    """Return the ids [1, K] of positions on the grid."""
    return (torch.tensor(rows) * GRID[1] + torch.tensor(cols))[None]


def test_attention_equals_the_formula():
    """q, k and v by head; pair i of a half turned by its row or column times 10000^(-i / 4)."""
    attention, x = mixer(), torch.randn(1, 4, 32).double()
    rows, cols = [0, 1, 1, 4], [3, 0, 6, 2]
    out = mixed_by(attention, x, Layout(GRID, 1, kept(rows[1:], cols[1:])))
    places = torch.tensor([[0, 0], *zip(rows[1:], cols[1:], strict=True)])  # an extra one ahead
    weight, bias = attention.qkv.weight, attention.qkv.bias
    q, k, v = (x[0] @ weight.T + bias).view(4, 3, 2, 16).unbind(1)

    def turned(z, norm):
        z = z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        pairs = torch.view_as_complex(z.reshape(4, 2, 8, 2))
        speed = 10000.0 ** -(torch.arange(4).double() / 4)
        angles = torch.cat([places[:, :1] * speed, places[:, 1:] * speed], 1)
        return torch.view_as_real(pairs * torch.exp(1j * angles)[:, None]).flatten(2)

    q, k = turned(q, attention.q_norm), turned(k, attention.k_norm)
    weights = (torch.einsum("ihd,jhd->hij", q, k) / 4).softmax(-1)
    mixed = torch.einsum("hij,jhd->ihd", weights, v).flatten(1)
    torch.testing.assert_close(out[0], attention.proj(mixed), atol=1e-5, rtol=1e-5)


def attended_by_loop(attention, x, layout, size):
    """Attention one token at a time, over the extra tokens and the tokens in its window of
    `size`."""
    rotation, (rows, cols) = attention.prepare(layout), layout.rows_cols()
    q, k, v = attention.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
    q, k = (
        rotate(norm(z).transpose(1, 2), rotation.cos, rotation.sin).transpose(1, 2)
        for z, norm in ((q, attention.q_norm), (k, attention.k_norm))
    )
    mixed = torch.zeros_like(v)
    for b in range(len(x)):
        places = [None] * layout.num_extra
        places += zip((rows[b] // size).tolist(), (cols[b] // size).tolist(), strict=True)
        for i, own in enumerate(places):
            seen = [j for j, other in enumerate(places) if None in (own, other) or own == other]
            for head in range(2):
                weights = (k[b, seen, head] @ q[b, i, head] / 4).softmax(0)
                mixed[b, i, head] = weights @ v[b, seen, head]
    return attention.proj(mixed.flatten(2))


IDS = torch.tensor([[0, 1, 8, 13, 22, 34], [2, 5, 10, 11, 19, 30]])
LAYOUTS = [Layout(GRID, 0, batch=2), Layout(GRID, 0, IDS), Layout(GRID, 3, IDS, num_context=2)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])  # at last, all of the grid
@torch.no_grad()
def test_tokens_attend_within_their_window_dense_and_routed(size):
    attention = mixer(window=size)
    for layout in LAYOUTS:
        x = torch.randn(2, layout.num_extra + layout.positions().shape[1], 32).double()
        expected = attended_by_loop(attention, x, layout, size)
        torch.testing.assert_close(mixed_by(attention, x, layout), expected)
