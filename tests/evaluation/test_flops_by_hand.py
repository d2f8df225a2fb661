"""The counted FLOPs equal those by hand, to the last one: every backbone, dense and routed.

Nothing remains that the two would count differently. What neither counts is elementwise: norms,
activations, gates, q-shifts, residuals, and in a scan what has no state or is no matrix product.
"""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.evaluation import hand_flops
from tread_zoo import create_backbone
from tread_zoo.diffusion import (
    ClassifierFree,
    Euler,
    FlowMatching,
    IntervalGuidance,
    SamplingOptions,
    SparseGuidance,
)
from tread_zoo.evaluation.flops import count_flops, count_sampling, stage_flops, training_flops
from tread_zoo.kernels import get_forms, set_forms
from tread_zoo.routing import Route, build_routing

# Digits: 8x8 pixels of 1 channel in patches of 2x2, so 16 tokens of 4 values.
TINY = {
    "uvit_tiny": partial(hand_flops.uvit, 16, 4, 4, D=74, depth=12, side=8, conv_channels=1),
    "mamba_tiny": partial(hand_flops.mamba, 16, 4, 4, D=88, depth=12, S=4, rank=6),
    "mamba2_tiny": partial(hand_flops.mamba2, 16, 4, 4, D=120, depth=12, expand=1, S=16, P=40),
    "rwkv_tiny": partial(hand_flops.rwkv, 16, 4, 4, D=60, depth=13),
    "zigma_tiny": partial(hand_flops.zigma, 16, 4, 4, D=88, depth=12, S=4, rank=6),
}
# Latents of 32x32 of 4 channels: 256 tokens of 16 values; the state-space dual has 5 chunks.
LARGE = {
    "uvit_s_2": partial(hand_flops.uvit, 256, 16, 16, D=512, depth=12, side=32, conv_channels=4),
    "mamba_s_2": partial(hand_flops.mamba, 256, 16, 16, D=368, depth=24, S=16, rank=23),
    "mamba2_matched_s": partial(
        hand_flops.mamba2, 256, 16, 16, D=384, depth=28, expand=2, S=64, P=64
    ),
    "rwkv_s_2": partial(hand_flops.rwkv, 256, 16, 16, D=384, depth=13),
    "zigma_b_2": partial(hand_flops.zigma, 256, 16, 16, D=768, depth=24, S=16, rank=48),
}
SCANS = ("mamba_tiny", "mamba2_tiny", "rwkv_tiny")


def digits(name, num_classes=10, **options):
    return create_backbone(name, input_size=8, in_channels=1, num_classes=num_classes, **options)


def concrete(routes, batch=1):
    return [Route(start, end, torch.arange(n).expand(batch, -1)) for start, end, n in routes]


def check_both_passes(network, hand, routes=()):
    assert count_flops(network, routes=concrete(routes)) == hand.forward
    assert count_flops(network, routes=concrete(routes), backward=True) == hand.both


@pytest.mark.parametrize(("routes", "labels"), [((), False), (((0, 2, 5), (3, 7, 11)), True)])
@pytest.mark.parametrize("name", TINY)
def test_tiny_networks(name, routes, labels):
    depth = 7 if name.startswith(("rwkv", "zigma")) else 6
    hand = TINY[name](depth=depth, labels=labels, routes=routes)
    check_both_passes(digits(name, 10 * labels, depth=depth), hand, routes)


@pytest.mark.parametrize("name", LARGE)
def test_published_widths(name):
    depth, routes = 5 if name.startswith("rwkv") else 4, [(1, 3, 200), (3, 4, 65)]
    with torch.device("meta"):
        network = create_backbone(name, input_size=32, in_channels=4, num_classes=1000, depth=depth)
    check_both_passes(network, LARGE[name](depth=depth, routes=routes), routes)


@pytest.mark.parametrize(
    ("gaps", "scan_order"),
    [
        ("decay", "hilbert"),
        pytest.param("reset", "serpentine8", marks=pytest.mark.slow),
        pytest.param("ignore", "raster", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", SCANS)
def test_gaps_and_orders_cost_nothing(name, gaps, scan_order):
    """Directions with gaps of their own take two calls, of half the channels each."""
    depth = 5 if name.startswith("rwkv") else 4
    routes = [(0, 2, 5), (3, 4, 9)]
    ids = [torch.tensor([[0, 2, 3, 9, 15]]), torch.tensor([[0, 1, 4, 5, 8, 10, 11, 12, 15]])]
    gapped = [Route(start, end, kept) for (start, end, _), kept in zip(routes, ids, strict=True)]
    network = digits(name, depth=depth, gaps=gaps, scan_order=scan_order)
    hand = TINY[name](depth=depth, routes=routes)
    assert count_flops(network, routes=gapped, backward=True) == hand.both


def test_guided_sampling_of_a_scan():
    """5 Euler steps; at rate 0.7 a call keeps 16 - 11 tokens in the default route, [2, 9)."""
    name = "mamba2_tiny"
    dense, weak = TINY[name]().forward, TINY[name](routes=[(2, 9, 5)]).forward
    network = digits(name)
    for guidance, evaluations, expected in (
        (ClassifierFree(scale=2.0), 10, 10 * dense),
        (IntervalGuidance(scale=2.0, low=0.1, high=0.5), 7, 7 * dense),  # at 0.4, 0.2 of 1, .8, …
        (SparseGuidance(strong_rate=0.0, weak_rate=0.7), 10, 5 * (dense + weak)),
    ):
        options = SamplingOptions(Euler(), 5, guidance=guidance)
        found = count_sampling(network, FlowMatching(), options)
        assert (found.evaluations, found.flops) == (evaluations, expected)


def test_a_scheduled_run():
    """Of 10 steps the first 2 and the last are dense. The others are routed half of the time: 3 at
    rate 0.75, which keeps 4 tokens in each of two routes, then 4 at 0.25, which keeps 12."""
    network = digits("mamba2_tiny", depth=4)
    routing = build_routing(
        "tread",
        num_blocks=network.num_blocks,
        default_selector=network.default_selector,
        routes=[{"start": 1, "end": 2}, {"start": 3, "end": 5}],
        selection_rate=0.75,
        schedule="steps",
        rate_steps=[[0.5, 0.25]],
        warm_start=0.2,
        dense_tail=0.1,
        probability=0.5,
    )
    hand = partial(TINY["mamba2_tiny"], depth=4)
    dense, few, many = (
        hand(routes=routes).both
        for routes in ([], [(1, 2, 4), (3, 5, 4)], [(1, 2, 12), (3, 5, 12)])
    )
    expected = (3 * dense + 3 * (few + dense) / 2 + 4 * (many + dense) / 2) / 10
    assert training_flops(network, routing, 10) == pytest.approx(expected, rel=1e-12)
    assert stage_flops(network, routing, 10) == [
        (range(2), dense),
        (range(2, 5), (few + dense) / 2),
        (range(5, 9), (many + dense) / 2),
        (range(9, 10), dense),
    ]


# One number, whatever runs ------------------------------------------------------------------------


@pytest.fixture
def forms():
    yield set_forms
    set_forms({})


def shallow(name):
    """Return a network of three blocks, and its costs by hand."""
    depth = 3 if name.startswith("rwkv") else 2
    return digits(name, depth=depth), partial(TINY[name], depth=depth)


BY_HAND = [
    ("attention", "naive", "uvit_tiny"),
    ("causal_conv1d", "naive", "mamba_tiny"),
    ("selective_scan", "naive", "mamba_tiny"),
    ("selective_scan", "triton", "mamba_tiny"),  # which a device without data cannot run
    ("ssd", "naive", "mamba2_tiny"),
    ("bidirectional_wkv", "naive", "rwkv_tiny"),
    ("bidirectional_wkv", "triton", "rwkv_tiny"),
]


@pytest.mark.parametrize(("operation", "form", "name"), BY_HAND)
def test_a_form_set_by_hand_changes_nothing(forms, operation, form, name):
    if form == "triton":
        pytest.importorskip("triton")
    forms({operation: form})
    network, hand = shallow(name)
    assert count_flops(network, backward=True) == hand().both
    assert get_forms()[operation] == form, "counting leaves the choice as it was"


@pytest.mark.parametrize("name", ["uvit_tiny", "mamba_tiny"])
def test_compiled_blocks_and_the_mode_of_gradients_change_nothing(name):
    network, hand = shallow(name)
    for block in network.blocks:
        block.compile(backend="eager")
    network.requires_grad_(False)
    with torch.no_grad():
        check_both_passes(network, hand())
    with torch.inference_mode():
        assert count_flops(network, backward=True) == hand().both
    assert count_flops(network.requires_grad_(True)) == hand().forward


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", TINY)
def test_a_real_pass_counts_the_same(name, grad, forms):
    """On a CPU, with data. Its fused attention would compute the scores again in the backward
    pass, and count that: the torch form does not."""
    forms({"attention": "torch"})
    network, hand = shallow(name)
    routes = [(1, 2, 6)]
    x, t, y = torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([1, 2, 10])
    with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
        out = network(x, t, y, routes=concrete(routes, batch=3))
        if grad:
            out.sum().backward()
    found = hand(routes=routes)
    assert counter.get_total_flops() == 3 * (found.both if grad else found.forward)
