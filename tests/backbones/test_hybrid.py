import pytest
import torch

from backbones.hybrid import MIXERS
from tread_zoo import create_backbone
from tread_zoo.testing import CHECKS, Probe

SIZES = {"input_size": 8, "in_channels": 1, "num_classes": 10}


def test_all_attention_is_lightning_dit_to_the_bit():
    networks = []
    for name, options in (("lightning_dit_tiny", {}), ("hybrid_tiny", {"pattern": "attention:1"})):
        torch.manual_seed(0)
        networks.append(create_backbone(name, **SIZES, **options))
    own, other = (network.state_dict() for network in networks)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[key], other[key]) for key in own)
    probes = (
        Probe("lightning_dit_tiny", overrides={"depth": 3}),
        Probe("hybrid_tiny", overrides={"depth": 3, "pattern": "attention"}),
    )
    outputs = []
    for probe in probes:
        network = probe.build()
        outputs.append(network(*probe.inputs(), routes=[probe.route(network)]))
    assert torch.equal(*outputs)


def test_the_pattern_is_repeated_to_the_depth():
    network = create_backbone("hybrid_tiny", **SIZES, depth=5, pattern="mamba2:2, attention")
    kinds = [type(block.mixer).__name__ for block in network.blocks]
    assert kinds == [*2 * ["StateSpaceDual"], "RotaryAttention", *2 * ["StateSpaceDual"]]


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_depends_on_what_is_declared(name):
    overrides = {"hidden_size": 32, "depth": 3, "pattern": name}
    CHECKS["blocks_depend_on_what_they_declare"](Probe("hybrid_tiny", overrides=overrides))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("atention:3", "Did you mean 'attention'"),
        ("attention:0", "'0' must be a number of blocks"),
        ("attention:1,", "pattern='' is unknown"),
    ],
)
def test_a_pattern_that_cannot_be_read(pattern, said):
    with pytest.raises(ValueError, match=said):
        create_backbone("hybrid_tiny", **SIZES, pattern=pattern)


@pytest.mark.parametrize("pattern", MIXERS)
def test_a_width_that_the_heads_do_not_divide(pattern):
    with pytest.raises(ValueError, match="hidden_size=64"):
        create_backbone("hybrid_tiny", **SIZES, pattern=pattern, num_heads=3)
