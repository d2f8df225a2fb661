import torch

from tread_zoo import create_backbone
from tread_zoo.backbone import Layout
from tread_zoo.layers import sincos_2d


def build(**overrides):
    keywords = {"input_size": 8, "in_channels": 3, "num_classes": 10, "depth": 3}
    return create_backbone("dit_tiny", **{**keywords, **overrides})


def test_block_equals_the_formula_in_float64():
    backbone = build().double()
    block = backbone.blocks[0]
    torch.nn.init.normal_(block.modulation.weight, std=0.1)
    x, c = torch.randn(2, 5, 64).double(), torch.randn(2, 64).double()

    def norm(v):
        return (v - v.mean(-1, keepdim=True)) / (
            v.var(-1, unbiased=False, keepdim=True) + 1e-6
        ).sqrt()

    s1, g1, a1, s2, g2, a2 = (v[:, None] for v in block.modulation(c).chunk(6, -1))
    h = norm(x) * (1 + g1) + s1
    q, k, v = (h @ block.qkv.weight.T + block.qkv.bias).chunk(3, -1)
    heads = []
    for i in range(2):
        part = slice(32 * i, 32 * (i + 1))
        weights = (q[..., part] @ k[..., part].mT / 32**0.5).softmax(-1)
        heads.append(weights @ v[..., part])
    x1 = x + a1 * block.proj(torch.cat(heads, -1))
    h = norm(x1) * (1 + g2) + s2
    expected = x1 + a2 * block.mlp(h)
    torch.testing.assert_close(block(x, c, Layout((1, 5), 0)), expected)


def test_positions_follow_the_formula():
    table = sincos_2d(16, (2, 3)).view(2, 3, 16)
    row, col = 1, 2
    frequency = [10000 ** (-i / 4) for i in range(4)]
    expected = [
        *(torch.sin(torch.tensor(col * f)) for f in frequency),
        *(torch.cos(torch.tensor(col * f)) for f in frequency),
        *(torch.sin(torch.tensor(row * f)) for f in frequency),
        *(torch.cos(torch.tensor(row * f)) for f in frequency),
    ]
    torch.testing.assert_close(table[row, col], torch.stack(expected))


@torch.no_grad()
def test_a_context_is_tokens_ahead_and_its_mean_is_in_the_condition():
    backbone = create_backbone(
        "dit_tiny", input_size=8, in_channels=3, num_classes=0, depth=2, context_length=3,
        context_size=5,
    )  # fmt: skip
    x, t, y = torch.randn(2, 3, 8, 8), torch.rand(2), torch.randn(2, 3, 5)
    layer = backbone.context_embed
    (tokens,), condition = backbone.embed(x, t, y)
    context = y @ layer.weight.T + layer.bias + backbone.context_positions
    torch.testing.assert_close(tokens[:, :3], context)
    assert tokens.shape[1] == 3 + 16
    expected = torch.nn.functional.silu(backbone.time_embed(t) + context.mean(1))
    torch.testing.assert_close(condition, expected)
