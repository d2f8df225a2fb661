import pytest
import torch

from backbones.mixers.attention import CrossAttention
from tread_zoo import create_backbone


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


CONTEXTS = {"context_length": 3, "context_size": 4}


def test_cross_attention_by_its_formula():
    torch.manual_seed(0)
    layer = CrossAttention(8, num_heads=2).double()
    x, context = torch.randn(2, 5, 8).double(), torch.randn(2, 3, 8).double()
    assert not layer(x, context).any(), "it starts as nothing"
    torch.nn.init.normal_(layer.out.weight)
    normed = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    q, (k, v) = normed @ layer.q.weight.T + layer.q.bias, layer.kv(context).chunk(2, -1)
    heads = []
    for head in (slice(0, 4), slice(4, 8)):
        scores = (q[..., head] @ k[..., head].mT / 2).softmax(-1)
        heads.append(scores @ v[..., head])
    expected = torch.cat(heads, -1) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x, context), expected)


def test_shells_without_cross_attention_say_so():
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 0, **CONTEXTS}
    for name in ("rwkv_tiny", "zigma_tiny"):
        with pytest.raises(ValueError, match="context_as"):
            create_backbone(name, **sizes, context_as="cross_attention")
    labels = {**sizes, "num_classes": 10, "context_length": 0, "context_size": 0}
    with pytest.raises(ValueError, match="context_as"):
        create_backbone("dit_tiny", **labels, context_as="cross_attention")
