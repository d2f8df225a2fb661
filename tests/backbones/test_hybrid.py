import runpy

import pytest
import torch

from tests.small_run import fields_of
from tread_zoo import create_backbone, registry
from tread_zoo.config import make_config
from tread_zoo.testing import CHECKS, Probe

MIXERS = (
    "attention", "gated_deltanet", "gla", "kda", "linear_dit", "mamba", "mamba2", "rwkv7", "zigma",
)  # fmt: skip
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
    assert kinds == [*2 * ["BidirectionalSSD"], "RotaryAttention", *2 * ["BidirectionalSSD"]]


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_depends_on_what_is_declared(name):
    overrides = {"hidden_size": 32, "depth": 3, "pattern": name}
    CHECKS["blocks_depend_on_what_they_declare"](Probe("hybrid_tiny", overrides=overrides))


def test_a_list_gives_mixers_their_options():
    given = [{"name": "gated_deltanet", "repeat": 2, "per_channel": True}, {"name": "attention"}]
    network = create_backbone("hybrid_tiny", **SIZES, depth=6, pattern=given)
    own = [getattr(block.mixer, "per_channel", None) for block in network.blocks]
    assert own == 2 * [True, True, None]
    again = create_backbone(network.name, **network.config)
    assert again.state_dict().keys() == network.state_dict().keys()
    assert network.depends_on == ("order", "ids")


def test_a_list_from_the_command_line():
    given = "backbone.pattern=[{name: gla, repeat: 3, gaps: decay}, {name: attention}]"
    config = make_config(**fields_of("backbone=hybrid", given))
    assert config.backbone["pattern"][0] == {"name": "gla", "repeat": 3, "gaps": "decay"}


def test_a_mixer_of_another_package_can_stand_in_it(own_registry):
    runpy.run_path("examples/plugin/tread_zoo_mixer.py")
    pattern = [{"name": "mixer", "gated": False}, {"name": "gated_deltanet"}]
    probe = Probe("hybrid_tiny", overrides={"hidden_size": 32, "depth": 4, "pattern": pattern})
    for check in ("blocks_depend_on_what_they_declare", "gradients_flow", "blocks_see_kept_tokens"):
        CHECKS[check](probe)
    # A checkpoint names the plug-in; here its module is the one that runs the file.
    for given in (pattern, "mixer:2, attention"):
        used = registry.plugins_of([("backbone", {"name": "hybrid_tiny", "pattern": given})])
        assert used == ["<run_path>"]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ([{"name": "gla", "per_chanel": True}], "per_chanel"),
        ([{"name": "uvit"}], "pattern='uvit'"),
        ([], "must have a mixer"),
        ("atention:3", "Did you mean 'attention'"),
        ("attention:0", "'0' must be a number of blocks"),
    ],
)
def test_a_pattern_that_cannot_be_read(pattern, said):
    with pytest.raises(ValueError, match=said):
        create_backbone("hybrid_tiny", **SIZES, pattern=pattern)


@pytest.mark.parametrize("pattern", MIXERS)
def test_a_width_that_the_heads_do_not_divide(pattern):
    with pytest.raises(ValueError, match="hidden_size=64"):
        create_backbone("hybrid_tiny", **SIZES, pattern=pattern, num_heads=3)
