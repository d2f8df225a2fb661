"""What the loop refuses before it computes something else than was meant."""

import pytest
import torch

from tests.backbones.test_scan_mixers import randomized
from tests.test_contract import SMALL
from tests.testing.own_loops import Decays, DecaysByOwnLength
from tread_zoo import create_backbone
from tread_zoo.contract.backbone import Backbone
from tread_zoo.factory import at_size
from tread_zoo.routing import Select

X, T, Y = torch.zeros(2, 1, 8, 8), torch.zeros(2), torch.tensor([0, 3])
SIZES = {"input_size": 8, "in_channels": 1, "num_classes": 3}


def built(name="dit_tiny", **changes):
    return create_backbone(name, **{**SIZES, **SMALL[name], **changes})


@pytest.mark.parametrize(
    ("inputs", "changes"),
    [
        ((X[:, :, :6], T, Y), {}),
        ((X.expand(2, 3, 8, 8), T, Y), {}),
        ((X, T[:1], Y), {}),
        ((X, T[:, None], Y), {}),
        ((X, T, Y[:, None]), {}),
        ((X, T, Y), {"num_classes": 0}),
    ],
)
def test_inputs_that_would_broadcast_or_be_ignored(inputs, changes):
    with pytest.raises(ValueError):
        built(**changes)(*inputs)


@pytest.mark.parametrize("features", [[4], [-1]])
def test_features_of_blocks_that_are_not_there(features):
    with pytest.raises(ValueError, match="blocks are 0 … 3"):
        built()(X, T, Y, features=features)


@pytest.mark.parametrize("name", SMALL)
def test_an_empty_batch_is_empty(name):
    network = built(name)
    none = Select(1, 3, torch.zeros(0, 5, dtype=torch.int64))
    for routes in ((), (none,)):
        assert network(X[:0], T[:0], Y[:0], routes=routes).shape == X[:0].shape
    with pytest.raises(ValueError, match=r"t has shape \[2\]; expected \[0\]"):
        network(X[:0], T, Y[:0])


COMPUTED = {  # positions from the grid alone
    "dit_tiny", "lightning_dit_tiny", "linear_dit_tiny", "gla_tiny", "gated_deltanet_tiny",
    "kda_tiny", "rwkv7_tiny", "hybrid_tiny",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
@torch.no_grad()
def test_weights_serve_another_size_where_none_belong_to_a_position(name):
    network, x = randomized(built(name)).float().eval(), torch.randn(2, 1, 12, 8)
    assert at_size(network, 8, 8) is network
    if name not in COMPUTED:
        for size in ((12, 8), (4, 16), (8, 4)):  # (4, 16) has as many tokens
            with pytest.raises(ValueError, match=f"{name} has weights for each position"):
                at_size(network, *size)
        return
    expected = built(name, input_size=(12, 8))
    expected.load_state_dict(network.state_dict())
    other = at_size(network, 12, 8)
    assert not other.training
    assert torch.equal(other(x, T, Y), expected(x, T, Y))
    assert torch.equal(at_size(other, 8, 8)(x[:, :, :8], T, Y), network(x[:, :, :8], T, Y))
    assert not torch.equal(other(x, T, Y)[:, :, :8], network(x[:, :, :8], T, Y))
    with pytest.raises(ValueError, match="divisible"):
        at_size(network, 9, 8)


class BareEmbed(Decays):
    def embed(self, x, t, y):
        (tokens,), condition = super().embed(x, t, y)
        return tokens, condition


class UnsaidExtraToken(Decays):
    def embed(self, x, t, y):
        (tokens,), condition = super().embed(x, t, y)
        return (torch.cat([condition[:, None], tokens], dim=1),), condition


class SmallOutput(Decays):
    def head(self, streams, condition):
        return super().head(streams, condition)[:, :, 1:]


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (BareEmbed, r"embed returned .*\(tokens,\)"),
        (UnsaidExtraToken, "num_extra_tokens=0"),
        (SmallOutput, r"head returned \[2, 1, 7, 8\]"),
    ],
)
def test_methods_that_return_something_else(cls, words):
    with pytest.raises(TypeError, match=words):
        cls(**SIZES)(X, T, Y)


@pytest.mark.parametrize("skips", [{1: 2}, {2: 2}, {4: 0}])
def test_skips_from_a_later_block(skips):
    network = DecaysByOwnLength(**SIZES)
    network.skips = skips
    with pytest.raises(ValueError, match="producer first"):
        network(X, T, Y)


def test_what_blocks_depend_on_must_be_said():
    class Silent(Decays):
        def __init__(self):
            Backbone.__init__(self, **SIZES, patch_size=2)

    class Misspelt(Decays):
        dependence = ("idz",)

    with pytest.raises(TypeError, match="depends_on"):
        Silent()
    with pytest.raises(ValueError, match=r"'idz'.*ids"):
        Misspelt(**SIZES)
