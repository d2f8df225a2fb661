import torch

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
