"""The counted FLOPs equal the FLOPs by hand exactly: dense and routed, both passes.

Neither counts elementwise work: norms, activations, gates, q-shifts, residuals, and the parts of a
scan that have no state and are no matrix product.
"""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.evaluation import hand_flops
from tests.small_run import parts_of, settings
from tread_zoo import create_backbone
from tread_zoo.diffusion import (
    EDM,
    ClassifierFree,
    CustomGuidance,
    Euler,
    FlowMatching,
    Heun,
    IntervalGuidance,
    NoGuidance,
    PathDropGuidance,
    SamplingOptions,
    SparseAutoGuidance,
    SparseGuidance,
)
from tread_zoo.evaluation.flops import count_flops, count_sampling, stage_flops, training_flops
from tread_zoo.factory import add_routing
from tread_zoo.kernels import get_forms, set_forms, used_ops
from tread_zoo.registry import create
from tread_zoo.routing import Select
from tread_zoo.training.step import draw_step, step_flops, step_loss

# Digits: 8x8 pixels of 1 channel in patches of 2x2, so 16 tokens of 4 values.
TINY = {
    "dit_tiny": partial(hand_flops.dit, 16, 4, 4, D=64, depth=12),
    "mamba_tiny": partial(hand_flops.mamba, 16, 4, 4, D=88, depth=12, S=4, rank=6),
    "mamba2_tiny": partial(hand_flops.mamba2, 16, 4, 4, D=120, depth=12, expand=1, S=16, P=40),
    "rwkv_tiny": partial(hand_flops.rwkv, 16, 4, 4, D=60, depth=13),
}
EULER, FLOW = Euler(), FlowMatching()


def digits(name="dit_tiny", num_classes=10, **options):
    return create_backbone(name, input_size=8, in_channels=1, num_classes=num_classes, **options)


def concrete(routes, batch=1):
    return [Select(start, end, torch.arange(n).expand(batch, -1)) for start, end, n in routes]


def check_both_passes(network, hand, routes=()):
    assert count_flops(network, routes=concrete(routes)) == hand.forward
    assert count_flops(network, routes=concrete(routes), backward=True) == hand.both


@pytest.mark.slow
@pytest.mark.parametrize(("routes", "labels"), [((), False), (((0, 2, 5), (3, 5, 11)), True)])
@pytest.mark.parametrize("name", TINY)
def test_tiny_networks(name, routes, labels):
    depth = 5 if name.startswith("rwkv") else 4
    routes = [route for route in routes if route[1] <= depth]
    hand = TINY[name](depth=depth, labels=labels, routes=routes)
    check_both_passes(digits(name, 10 * labels, depth=depth), hand, routes)


@pytest.mark.slow
def test_several_chunks_of_a_published_width():
    """Latents of 4x32x32: 256 tokens of 16 values; routes keep some of the tokens."""
    sizes = {"D": 384, "depth": 4, "expand": 2, "S": 64, "P": 64}
    routes = [(1, 3, 200), (3, 4, 65)]
    with torch.device("meta"):
        network = create_backbone(
            "mamba2_matched_s", input_size=32, in_channels=4, num_classes=1000, depth=4
        )
    check_both_passes(network, hand_flops.mamba2(256, 16, 16, routes=routes, **sizes), routes)


def shallow(name):
    """Return a network of three blocks, and its costs by hand."""
    depth = 3 if name.startswith("rwkv") else 2
    return digits(name, depth=depth), partial(TINY[name], depth=depth)


@pytest.fixture
def forms():
    yield set_forms
    set_forms({})


def test_forms_compiled_blocks_and_the_mode_of_gradients_change_nothing(forms):
    forms({"selective_scan": "naive"})
    network, hand = shallow("mamba_tiny")
    for block in network.blocks:
        block.compile(backend="eager")
    network.requires_grad_(False)
    with torch.no_grad():
        check_both_passes(network, hand())
    with torch.inference_mode():
        assert count_flops(network, backward=True) == hand().both
    assert get_forms()["selective_scan"] == "naive", "counting leaves the choice as it was"


@pytest.mark.parametrize("name", TINY)
def test_a_real_pass_counts_the_same(name, forms):
    """On a CPU, with data. Its fused attention would compute the scores again in the backward
    pass, and count that: the torch form does not."""
    forms({"attention": "torch"})
    network, hand = shallow(name)
    end = network.num_blocks
    x, t, y = torch.randn(3, 1, 8, 8), torch.rand(3), torch.tensor([1, 2, 10])
    with FlopCounterMode(display=False) as counter:
        network(x, t, y, routes=concrete([(1, end, 6)], batch=3)).sum().backward()
    assert counter.get_total_flops() == 3 * hand(routes=[(1, end, 6)]).both
    assert count_flops(network, batch=3) == 3 * hand().forward


def test_networks_that_choose_different_numbers_of_tokens_are_traced_apart():
    """Their weights have equal shapes: the rate is an option of the method that owns them."""
    costs = []
    for rate in (0.75, 0.5):
        network = digits(depth=5)
        add_routing(network, create("routing", "mixture_of_depths", selection_rate=rate))
        costs.append(count_flops(network))
    assert costs[0] < costs[1]


@pytest.mark.slow
def test_a_scheduled_run():
    """Of 10 steps the first 2 and the last are dense. The others are routed half of the time: 3 at
    rate 0.75, which keeps 4 tokens in each of two routes, then 4 at 0.25, which keeps 12."""
    network = digits(depth=5)
    routing = create(
        "routing",
        "tread",
        routes=[{"start": 1, "end": 2}, {"start": 3, "end": 5}],
        selection_rate=["steps", 0.75, [0.5, 0.25]],
        warm_start=0.2,
        dense_tail=0.1,
        probability=0.5,
    )
    hand = partial(TINY["dit_tiny"], depth=5)
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


# Training -----------------------------------------------------------------------------------------


SELF_TAUGHT = "alignment=self_flow alignment.hidden_size=16"


def routed(overrides):
    return parts_of(settings("routing.start=1", "routing.end=3", *overrides.split()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        "objective=mean_flow objective.guidance_scale=2 objective.guidance_mix=0.5",
        "objective=mean_flow objective.derivative=exact",
        f"objective.second_level_fraction=0.25 {SELF_TAUGHT}",
        "objective=edm routing=maskdit",
        "objective=edm routing=sprint routing.path_drop=0",
        "backbone=mamba routing=token_merging",
        "objective=ddpm routing.selector=norm",
    ],
)
def test_a_step_costs_what_its_loss_computes(overrides, forms):
    """On a CPU, with data."""
    forms({"attention": "torch"})
    setup = routed(overrides)
    teacher = setup.backbone if setup.is_self_taught else None
    batch = next(setup.batches())
    with FlopCounterMode(display=False) as counter:
        drawn = draw_step(setup, batch, 0, 0, torch.device("cpu"))
        step_loss(setup, drawn, teacher=teacher).losses.sum().backward()
    ((_, each),) = step_flops(setup, setup.backbone)
    assert counter.get_total_flops() == len(batch[0]) * each


@pytest.mark.slow
def test_further_passes_and_teachers_count():
    """The averaged network runs three of its four blocks, and the projection is of 8 tokens."""
    network, routes = routed("").backbone, concrete([(1, 3, 8)])
    both = count_flops(network, routes=routes, backward=True)
    assert step_flops(routed(""), network) == [(range(6), both)]
    twice = both + count_flops(network, routes=routes)
    assert step_flops(routed("objective=mean_flow"), network) == [(range(6), twice)]
    head = 2 * 16 * 16 * 4 + 2 * 16 * 32  # of 16 tokens, and its modulation
    teacher = count_flops(digits(depth=3, hidden_size=16)) - head
    projection = 3 * 2 * 8 * 3 * 16 * 16
    assert step_flops(routed(f"{SELF_TAUGHT} alignment.stop=0.5"), network) == [
        (range(3), both + teacher + projection),
        (range(3, 6), both),
    ]


# Sampling -----------------------------------------------------------------------------------------


DIT = partial(TINY["dit_tiny"], depth=4)
DENSE = DIT().forward


def cost(
    guidance, sampler=EULER, *, network=None, objective=FLOW, num_steps=5, trained=None, **weak
):
    trained = trained or create("routing", "tread", start=1, end=3)
    options = SamplingOptions(sampler, num_steps, guidance=guidance, trained=trained)
    counted = count_sampling(network or digits(depth=4), objective, options, **weak)
    return counted.evaluations, counted.flops


@pytest.mark.parametrize(
    ("guidance", "evaluations", "given"),
    [
        (NoGuidance(), 5, {}),
        (NoGuidance(), 9, {"sampler": Heun(), "objective": EDM()}),  # once in the last step
        (ClassifierFree(scale=2.0), 10, {}),
        (ClassifierFree(scale=1.0), 5, {}),
        (IntervalGuidance(scale=2.0, low=0.1, high=0.5), 7, {}),  # at 0.4 and 0.2 of 1, .8, …
        (SparseGuidance(scale=1.0), 5, {}),
    ],
)
def test_sampling_costs_the_calls_that_happen(guidance, evaluations, given):
    assert cost(guidance, **given) == (evaluations, evaluations * DENSE)


def test_sparse_guidance_costs_what_its_routes_keep():
    """At rate 0.7 a route keeps 16 - 11 tokens."""
    few = DIT(routes=[(1, 3, 5)]).forward
    sparse = SparseGuidance(strong_rate=0.0, weak_rate=0.7)
    assert cost(sparse) == (10, 5 * (DENSE + few))


def test_path_drop_costs_what_is_left_and_counting_leaves_the_network_as_it_was():
    """Blocks 1 and 2 are skipped in the weak call; both calls pay for the fusion behind them."""
    network = digits(depth=4)
    sprint = create("routing", "sprint", start=1, end=3)
    add_routing(network, sprint)
    fusion = 2 * 16 * (2 * 64) * 64  # 16 tokens, from two streams of 64 to one
    short = DIT(depth=2).forward
    counted = cost(PathDropGuidance(scale=2.0), network=network, trained=sprint)
    assert counted == (10, 5 * (DENSE + fusion + short + fusion))
    assert network(torch.zeros(1, 1, 8, 8), torch.ones(1)).device.type == "cpu"


def test_what_changes_over_sampling_costs_the_calls_that_happen():
    """Of 5 steps the first guides nothing, the next two let 8 tokens bypass, two have no label."""
    routed, early = DIT(routes=[(1, 3, 8)]).forward, ("interval", 0.5, 0.0, 0.5)
    later = CustomGuidance(drop_label=True, weak_rate=early, scale=("interval", 2.0, 0.25, 1.0))
    assert cost(later) == (9, 7 * DENSE + 2 * routed)
    sparse = CustomGuidance(weak_rate=early)  # two steps have nothing to guide by
    assert cost(sparse) == (8, 5 * DENSE + 3 * routed)


@pytest.mark.slow
def test_two_networks_whose_rates_cross():
    """The rates follow a cosine from 0.6 to 0, and the reverse: of 16 tokens, 9, 4 and 0 bypass."""
    guidance = SparseAutoGuidance(weak_checkpoint="x")
    expected = sum(
        DIT(depth=depth, routes=[(1, 3, kept)]).forward for kept in (7, 12, 16) for depth in (3, 4)
    )
    assert cost(guidance, num_steps=3, weak=digits(depth=3)) == (6, expected)


def test_the_operations_of_a_network_are_noted_each_time():
    """The second of two runs in a process, as in a sweep, names its kernels, too."""
    for _ in range(2):
        used_ops.clear()
        count_flops(create_backbone("mamba_tiny", input_size=4, in_channels=1, num_classes=0))
        assert used_ops == {"causal_conv1d", "selective_scan"}
