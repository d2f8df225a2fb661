"""What every architecture promises besides the conformance kit."""

import inspect
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._pytree import tree_leaves

from backbones.mixers.base import Mixer
from backbones.shells import AdaLNBackbone
from tests.test_contract import SMALL
from tread_zoo import create_backbone, register_backbone
from tread_zoo.registry import get_entry
from tread_zoo.routing import Select, Stack
from tread_zoo.testing import CHECKS, Probe
from tread_zoo.training import setup


def build(name, **overrides):
    sizes = {"input_size": 8, "in_channels": 3, "num_classes": 10}
    return create_backbone(name, **{**sizes, **overrides})


@pytest.mark.parametrize("name", SMALL)
def test_the_output_starts_at_zero_and_learned_sigma_doubles_its_channels(name):
    out = build(name, learn_sigma=True)(torch.randn(2, 3, 8, 8), torch.rand(2))
    assert out.shape == (2, 6, 8, 8)
    if name != "uvit_tiny":  # which starts at random, as published
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("name", SMALL)
def test_the_default_route_of_a_laptop_size_lies_where_routing_is_known_to_help(name):
    with torch.device("meta"):
        network = build(name)
    depth = network.num_blocks
    start, end = Stack.of(network).span()
    assert depth >= 12
    assert start == (3 if network.skips else 2)
    assert end - start >= 6
    assert depth / 2 <= end <= 4 * depth / 5


@pytest.mark.parametrize("name", SMALL)
def test_a_route_may_lie_anywhere(name):
    probe = Probe(name, overrides=SMALL[name])
    network = probe.build()
    ids = probe.route(network).ids
    for start, end in itertools.combinations(range(network.num_blocks + 1), 2):
        out = network(*probe.inputs(), routes=[Select(start, end, ids)])
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("name", SMALL)
def test_the_residual_stream_stays_float32_under_autocast(name):
    probe, kinds = Probe(name, overrides=SMALL[name]), []
    network = probe.build()
    for block in network.blocks:
        block.register_forward_hook(
            lambda _, given, out: kinds.append({x.dtype for x in tree_leaves(out)})
        )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(*probe.inputs())
    assert len(kinds) == network.num_blocks
    assert all(torch.float32 in of_block for of_block in kinds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "dit_tiny" else pytest.mark.nightly) for name in SMALL],
)
def test_few_graphs_whatever_the_depth(name, monkeypatch):
    """At most four for dense and routed steps, another rate and another batch size."""
    counter = CompileCounter()
    monkeypatch.setattr(setup, "COMPILE_BACKEND", counter)
    probe = Probe(name, overrides={**SMALL[name], "depth": 6 + (name == "rwkv_tiny")})
    network = probe.build()
    torch.compiler.reset()
    setup.compile_blocks(network)
    for batch, rate in ((3, 0), (3, 0.5), (3, 0.4), (5, 0)):
        routes = [probe.route(network, rate=rate, batch=batch)] if rate else []
        network(*probe.inputs(batch), routes=routes).sum().backward()
    # The hybrid has three kinds of blocks: attention, RWKV-7 and its first block.
    assert counter.frame_count <= (5 if name == "hybrid_tiny" else 4)


@pytest.mark.parametrize("name", SMALL)
def test_registers_are_learned_tokens_that_no_route_takes(name):
    plain, probe = (
        Probe(name, overrides={**SMALL[name], **more}) for more in ({}, {"num_registers": 2})
    )
    network = probe.build()
    assert network.num_extra_tokens == plain.build().num_extra_tokens + 2
    with pytest.raises(ValueError, match="num_registers"):
        build(name, num_registers=-1)
    torch.manual_seed(0)
    before = build(name, **SMALL[name]).state_dict()
    torch.manual_seed(0)
    after = build(name, **SMALL[name], num_registers=2).state_dict()
    assert after.keys() - before.keys() == {"registers"}
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    out = network(*probe.inputs())
    with torch.no_grad():
        network.registers.neg_()
    assert (out != network(*probe.inputs())).flatten(1).any(1).all(), "they reach no image"


SHELLS = ("dit_tiny", "mamba_tiny", "rwkv7_tiny", "uvit_tiny")  # one of each


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in SHELLS else pytest.param(n, marks=pytest.mark.nightly) for n in SMALL]
)
def test_registers_keep_the_contract(name):
    probe = Probe(name, overrides={**SMALL[name], "num_registers": 2})
    for check in (
        "tokens_leave_and_rejoin", "blocks_see_kept_tokens", "bypassed_tokens_are_unseen",
        "gradients_flow", "scan_order_is_the_dense_one", "blocks_depend_on_what_they_declare",
        "contexts_stay_with_their_images", "save_and_load",
    ):  # fmt: skip
        CHECKS[check](probe)


CROSS = {"context_as": "cross_attention", "context_length": 3, "context_size": 4}
WINDOWS = [{"name": "attention", "window": 2}, {"name": "attention", "window": 3},
           {"name": "linear_dit"}, {"name": "attention"}]  # fmt: skip
OPTIONS = [  # of a row, and what its blocks then depend on
    ("dit_tiny", CROSS, ()),
    ("lightning_dit_tiny", {**CROSS, "num_registers": 1}, ("order", "ids")),
    ("hybrid_tiny", CROSS, ("order", "ids")),
    ("lightning_dit_tiny", {"window": 2}, ("order", "ids")),
    ("linear_dit_tiny", {}, ()),
    ("linear_dit_tiny", {"rotary": True}, ("order", "ids")),
    ("hybrid_tiny", {"pattern": WINDOWS}, ("order", "ids")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "depends_on"), OPTIONS)
def test_options_keep_the_contract(name, options, depends_on):
    probe = Probe(name, overrides={**SMALL[name], **options})
    assert set(depends_on) <= set(probe.build().depends_on)
    if name != "hybrid_tiny":
        assert probe.build().depends_on == depends_on
    if options.get("context_as"):  # no part of the sequence
        assert probe.build().num_extra_tokens == options.get("num_registers", 0)
    for check in (
        "tokens_leave_and_rejoin", "blocks_see_kept_tokens", "bypassed_tokens_are_unseen",
        "blocks_depend_on_what_they_declare", "blocks_depend_on_their_arguments_alone",
        "gradients_flow", "conditions_matter", "half_precision", "recomputation", "save_and_load",
        "contexts_condition_or_are_refused", "contexts_stay_with_their_images",
    ):  # fmt: skip
        CHECKS[check](probe)


@pytest.mark.parametrize("name", ["dit_tiny", "lightning_dit_tiny", "mamba_tiny", "hybrid_tiny"])
def test_a_misspelt_keyword_of_a_class_is_an_error(name):
    network = get_entry("backbone", name).target
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10}
    with pytest.raises(TypeError, match="hiden_size"):
        network(**sizes, hiden_size=64)
    assert {"hidden_size", "time_scale", "depth"} <= inspect.signature(network).parameters.keys()


def test_a_mixer_that_takes_any_keyword_is_refused():
    class Open(Mixer):
        def __init__(self, hidden_size: int, **anything):
            super().__init__()

    with pytest.raises(ValueError, match="misspelt"):
        register_backbone("open")(type("OpenNet", (AdaLNBackbone,), {"mixer": Open}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("dit_tiny", {"hidden_size": 66, "num_heads": 2}),
        ("lightning_dit_tiny", {"hidden_size": 36, "num_heads": 2}),
        ("gla_tiny", {"num_heads": 3}),
        ("mamba_tiny", {"depth": 5}),
        ("mamba_tiny", {"gaps": "zero"}),
        ("mamba2_tiny", {"hidden_size": 15, "head_size": 3}),
        ("mamba2_tiny", {"scan_order": "hilbrt"}),
        ("rwkv_tiny", {"depth": 6}),
        ("uvit_tiny", {"depth": 5}),
        ("zigma_tiny", {"scan_order": "serpentine9"}),
    ],
)
def test_sizes_that_do_not_fit_are_named(name, changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        build(name, **changes)
