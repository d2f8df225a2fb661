"""The counted FLOPs equal those by hand, to the last one: every backbone, dense and routed.

Nothing remains that the two would count differently. What neither counts is elementwise: norms,
activations, gates, q-shifts, residuals, and in a scan what has no state or is no matrix product.
"""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.evaluation import hand_flops
from tests.processes import run_python
from tests.scripts.test_command_line import ROOT
from tread_zoo import create_backbone
from tread_zoo.diffusion import (
    ClassifierFree,
    Euler,
    FlowMatching,
    IntervalGuidance,
    SamplingOptions,
    SparseGuidance,
)
from tread_zoo.evaluation.flops import count_flops, count_sampling, training_flops
from tread_zoo.kernels import set_forms
from tread_zoo.routing import Route, build_routing
from tread_zoo.training.compiling import compile_blocks

# Digits: 8x8 pixels of 1 channel in patches of 2x2, so 16 tokens of 4 values.
TINY = {
    "uvit_tiny": partial(hand_flops.uvit, 16, 4, 4, D=88, depth=8, side=8, conv_channels=1),
    "mamba_tiny": partial(hand_flops.mamba, 16, 4, 4, D=104, depth=8, S=4, rank=7),
    "mamba2_tiny": partial(hand_flops.mamba2, 16, 4, 4, D=138, depth=8, expand=1, S=16, P=46),
    "rwkv_tiny": partial(hand_flops.rwkv, 16, 4, 4, D=80, depth=7),
}
# Latents of 32x32 of 4 channels: 256 tokens of 16 values; the state-space dual has 5 chunks.
SMALL = {
    "uvit_s_2": partial(hand_flops.uvit, 256, 16, 16, D=512, depth=12, side=32, conv_channels=4),
    "mamba_s_2": partial(hand_flops.mamba, 256, 16, 16, D=368, depth=24, S=16, rank=23),
    "mamba2_matched_s": partial(
        hand_flops.mamba2, 256, 16, 16, D=384, depth=28, expand=2, S=64, P=64
    ),
    "rwkv_s_2": partial(hand_flops.rwkv, 256, 16, 16, D=384, depth=13),
}
ROUTES = {
    "dense": [],
    "one": [(2, 5, 8)],
    "over a skip": [(1, 6, 3)],
    "two": [(0, 2, 5), (3, 7, 11)],
}


def digits(name, num_classes=10, **options):
    return create_backbone(name, input_size=8, in_channels=1, num_classes=num_classes, **options)


def concrete(routes, batch=1):
    return [Route(start, end, torch.arange(n).expand(batch, -1)) for start, end, n in routes]


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("routes", ROUTES.values(), ids=ROUTES)
@pytest.mark.parametrize("name", TINY)
def test_tiny_networks(name, routes, labels):
    network, hand = digits(name, 10 * labels), TINY[name](labels=labels, routes=routes)
    assert count_flops(network, routes=concrete(routes)) == hand.forward
    assert count_flops(network, routes=concrete(routes), backward=True) == hand.both


@pytest.mark.parametrize("routes", [[], [(2, 6, 128)], [(1, 4, 200), (4, 9, 65)]])
@pytest.mark.parametrize("name", SMALL)
def test_networks_of_a_published_size(name, routes):
    with torch.device("meta"):
        network = create_backbone(name, input_size=32, in_channels=4, num_classes=1000)
    hand = SMALL[name](routes=routes)
    assert count_flops(network, routes=concrete(routes)) == hand.forward
    assert count_flops(network, routes=concrete(routes), backward=True) == hand.both


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, {key: value})
        for name in ("mamba_tiny", "mamba2_tiny", "rwkv_tiny")
        for key, values in {
            "gaps": ("ignore", "reset", "decay"),
            "scan_order": ("raster", "serpentine8", "hilbert"),
        }.items()
        for value in values
    ],
)
def test_gaps_and_orders_cost_nothing(name, option):
    """The directions have gaps of their own and take two calls, of half the channels each."""
    routes = [(1, 3, 5), (4, 6, 9)]
    ids = [torch.tensor([[0, 2, 3, 9, 15]]), torch.tensor([[0, 1, 4, 5, 8, 10, 11, 12, 15]])]
    gapped = [Route(start, end, kept) for (start, end, _), kept in zip(routes, ids, strict=True)]
    hand = TINY[name](routes=routes)
    assert count_flops(digits(name, **option), routes=gapped, backward=True) == hand.both


@pytest.mark.parametrize(
    ("name", "start", "end"), [("mamba_tiny", 2, 5), ("mamba2_tiny", 2, 5), ("rwkv_tiny", 2, 5)]
)
def test_guided_sampling_of_a_scan(name, start, end):
    """5 Euler steps; at rate 0.7 a call keeps 16 - 11 tokens in the default route."""
    dense, weak = TINY[name]().forward, TINY[name](routes=[(start, end, 5)]).forward
    for guidance, evaluations, expected in (
        (ClassifierFree(scale=2.0), 10, 10 * dense),
        (IntervalGuidance(scale=2.0, low=0.1, high=0.5), 7, 7 * dense),  # at 0.4, 0.2 of 1, .8, …
        (SparseGuidance(strong_rate=0.0, weak_rate=0.7), 10, 5 * (dense + weak)),
    ):
        options = SamplingOptions(Euler(), 5, guidance=guidance)
        found = count_sampling(digits(name), FlowMatching(), options)
        assert (found.evaluations, found.flops) == (evaluations, expected)


@pytest.mark.parametrize("name", TINY)
def test_a_scheduled_run(name):
    """Of 10 steps the first 2 and the last are dense. The others are routed half of the time: 3 at
    rate 0.75, which keeps 4 tokens in each of two routes, then 4 at 0.25, which keeps 12."""
    network = digits(name)
    routing = build_routing(
        "tread",
        num_blocks=network.num_blocks,
        default_selector=network.default_selector,
        routes=[{"start": 1, "end": 2}, {"start": 3, "end": 6}],
        selection_rate=0.75,
        schedule="steps",
        rate_steps=[[0.5, 0.25]],
        warm_start=0.2,
        dense_tail=0.1,
        probability=0.5,
    )
    dense, few, many = (
        TINY[name](routes=routes).both
        for routes in ([], [(1, 2, 4), (3, 6, 4)], [(1, 2, 12), (3, 6, 12)])
    )
    expected = (3 * dense + 3 * (few + dense) / 2 + 4 * (many + dense) / 2) / 10
    assert training_flops(network, routing, 10) == pytest.approx(expected, rel=1e-12)


# One number, whatever runs ------------------------------------------------------------------------


@pytest.fixture
def forms():
    yield set_forms
    set_forms({})


BY_HAND = [
    ("attention", "naive", "uvit_tiny"),
    ("attention", "torch", "uvit_tiny"),
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
    assert count_flops(digits(name), backward=True) == TINY[name]().both
    from tread_zoo.kernels import get_forms

    assert get_forms()[operation] == form, "counting leaves the choice as it was"


@pytest.mark.parametrize("name", TINY)
def test_compiled_blocks_and_the_mode_of_gradients_change_nothing(name):
    network, hand = digits(name), TINY[name]()
    compile_blocks(network)
    with torch.no_grad():
        assert count_flops(network) == hand.forward
        assert count_flops(network, backward=True) == hand.both
    network.requires_grad_(False)
    assert count_flops(network) == hand.forward
    assert count_flops(network, backward=True) == hand.both


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", TINY)
def test_a_real_pass_counts_the_same(name, grad, forms):
    """On a CPU, with data. Its fused attention would compute the scores again in the backward
    pass, and count that: the torch form does not."""
    forms({"attention": "torch"})
    routes, network = [(2, 5, 6)], digits(name)
    hand = TINY[name](routes=routes)
    x, t, y = torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([1, 2, 10])
    with torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
        out = network(x, t, y, routes=concrete(routes, batch=3))
        if grad:
            out.sum().backward()
    assert counter.get_total_flops() == 3 * (hand.both if grad else hand.forward)


@pytest.mark.slow
def test_the_printed_list_is_counted_so():
    done = run_python(
        ROOT / "scripts/list_backbones.py", "pattern=*_s_2", "selection_rate=0.75", cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
    ranges = {"uvit_s_2": (2, 11), "mamba_s_2": (2, 21), "rwkv_s_2": (2, 11)}
    for name, (start, end) in ranges.items():
        dense, routed = SMALL[name]().forward, SMALL[name](routes=[(start, end, 64)]).forward
        wanted = [f"{dense / 1e9:.3f}", f"{routed / 1e9:.3f}", f"{routed / dense:.3f}"]
        assert rows[name][2:5] == wanted, name
        assert rows[name][-2] == f"{start}:{end}"
