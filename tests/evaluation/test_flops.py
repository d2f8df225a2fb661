import pytest
import torch

from tread_zoo import create_backbone
from tread_zoo.diffusion import (
    EDM,
    ClassifierFree,
    Euler,
    FlowMatching,
    Heun,
    IntervalGuidance,
    NoGuidance,
    PartsGuidance,
    PathDropGuidance,
    SamplingOptions,
    SparseAutoGuidance,
    SparseGuidance,
)
from tread_zoo.evaluation.flops import count_flops, count_sampling
from tread_zoo.routing import Route


def dit_forward_flops(tokens, width, depth, kept, routed, patch_values):
    """FLOPs of a DiT forward pass by hand; a multiply-add is 2."""

    def block(n):
        linear = 2 * n * width * (3 * width + width + 8 * width)
        attention = 2 * 2 * n * n * width
        modulation = 2 * width * 6 * width
        return linear + attention + modulation

    ends = 2 * tokens * patch_values * width * 2  # in and out
    time = 2 * (256 * width + width * width)
    head = 2 * width * 2 * width
    return ends + time + head + (depth - routed) * block(tokens) + routed * block(kept)


@pytest.mark.parametrize(("kept", "routed"), [(16, 0), (4, 3), (8, 6)])
def test_dit_equals_the_count_by_hand(kept, routed):
    backbone = create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10)
    routes = [Route(2, 2 + routed, torch.arange(kept)[None])] if routed else []
    expected = dit_forward_flops(16, 64, 12, kept, routed, patch_values=4)
    assert count_flops(backbone, routes=routes) == expected


def test_backward_is_twice_forward_but_for_the_input():
    backbone = create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10)
    forward, both = count_flops(backbone), count_flops(backbone, backward=True)
    first_layers = 2 * 16 * 4 * 64 + 2 * 256 * 64  # no gradient is needed for pixels and sinusoids
    assert both == 3 * forward - first_layers


@pytest.mark.parametrize("name", ["dit_tiny", "mamba_tiny"])
def test_the_meta_device_counts_what_the_cpu_does(name):
    from torch.utils.flop_counter import FlopCounterMode

    backbone = create_backbone(name, input_size=8, in_channels=1, num_classes=10)
    with FlopCounterMode(display=False) as counter:
        backbone(torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([1, 2]))
    assert counter.get_total_flops() == count_flops(backbone, batch=2)


def test_flops_grow_with_the_batch_alone():
    backbone = create_backbone("mamba_tiny", input_size=8, in_channels=1, num_classes=10)
    assert count_flops(backbone, batch=6) == 6 * count_flops(backbone)


# Sampling -----------------------------------------------------------------------------------------


def digits_network(**options):
    return create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10, **options)


EULER, FLOW = Euler(), FlowMatching()


def cost(network, guidance, sampler=EULER, *, num_steps=5, objective=FLOW, **weak):
    found = count_sampling(
        network, objective, SamplingOptions(sampler, num_steps, guidance=guidance), **weak
    )
    return found.evaluations, found.flops


DENSE = dit_forward_flops(16, 64, 12, 16, 0, patch_values=4)


@pytest.mark.parametrize(
    ("guidance", "evaluations"),
    [
        (NoGuidance(), 5),
        (ClassifierFree(scale=2.0), 10),
        (ClassifierFree(scale=1.0), 5),
        (ClassifierFree(scale=0.0), 5),
        (IntervalGuidance(scale=2.0, low=0.1, high=0.5), 7),  # at 0.4 and 0.2 of 1, .8, …
        (SparseGuidance(scale=1.0), 5),
    ],
)
def test_sampling_costs_the_calls_that_happen(guidance, evaluations):
    assert cost(digits_network(), guidance) == (evaluations, evaluations * DENSE)


def test_heun_evaluates_twice_but_for_the_last_step():
    network = digits_network()
    assert cost(network, NoGuidance(), Heun(), objective=EDM()) == (9, 9 * DENSE)
    assert cost(network, ClassifierFree(), Heun()) == (18, 18 * DENSE)


def test_sparse_guidance_costs_its_share_of_classifier_free_guidance():
    """At rates 0 and 0.7 a route of blocks 2 … 7 keeps 16 - 11 tokens, by hand."""
    network = digits_network()
    routed = dit_forward_flops(16, 64, 12, 5, 6, patch_values=4)
    evaluations, flops = cost(network, SparseGuidance(strong_rate=0.0, weak_rate=0.7))
    assert (evaluations, flops) == (10, 5 * (DENSE + routed))
    share = flops / cost(network, ClassifierFree())[1]
    assert share == pytest.approx((1 + routed / DENSE) / 2, rel=1e-12)
    both = cost(network, SparseGuidance(strong_rate=0.25, weak_rate=0.7))[1]
    assert both == 5 * (dit_forward_flops(16, 64, 12, 12, 6, patch_values=4) + routed)


def test_path_drop_costs_what_is_left():
    """Blocks 2 … 7 are skipped in the weak call; both calls pay for the fusion behind them."""
    network = digits_network()
    network.add_fusions([(2, 8)])
    fusion = 2 * 16 * (2 * 64) * 64  # 16 tokens, from two streams of 64 to one
    short = dit_forward_flops(16, 64, 6, 16, 0, patch_values=4)
    found = cost(network, PathDropGuidance(scale=2.0))
    assert found == (10, 5 * (DENSE + fusion + short + fusion))


def shallow_flops(depth, kept):
    return dit_forward_flops(16, 64, depth, kept, 2, patch_values=4)


def test_what_changes_over_sampling_costs_the_calls_that_happen():
    """Of 5 steps the first guides nothing, the next two let 8 tokens bypass, two have no label."""
    dense, routed = shallow_flops(4, 16), shallow_flops(4, 8)
    network, early = digits_network(depth=4), ("interval", 0.5, 0.0, 0.5)
    later = PartsGuidance(
        drop_label=True, weak_rate=early, scale=("interval", 2.0, 0.25, 1.0), start=1, end=3
    )
    assert cost(network, later) == (9, 7 * dense + 2 * routed)
    sparse = PartsGuidance(weak_rate=early, start=1, end=3)  # two steps have nothing to guide by
    assert cost(network, sparse) == (8, 5 * dense + 3 * routed)


def test_two_networks_whose_rates_cross():
    """By a cosine from 0.6 to 0, and back, of 16 tokens bypass 9, 4, 0."""
    network, weak = digits_network(depth=4), digits_network(depth=3)
    guidance = SparseAutoGuidance(weak_checkpoint="x", start=1, end=3)
    expected = sum(shallow_flops(4, kept) + shallow_flops(3, kept) for kept in (7, 12, 16))
    assert cost(network, guidance, num_steps=3, weak=weak) == (6, expected)


def test_counting_leaves_the_network_as_it_was():
    network = digits_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    cost(network, ClassifierFree())
    assert "forward" not in vars(network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network(torch.zeros(1, 1, 8, 8), torch.ones(1)).device.type == "cpu"
