"""Sampling at a selection rate: the routes of training, drawn by seed, image and evaluation."""

from dataclasses import replace

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo.diffusion import FlowMatching, build_sampling, generate
from tread_zoo.evaluation.flops import count_flops, count_sampling
from tread_zoo.registry import create
from tread_zoo.routing import Stack
from tread_zoo.seeding import make_image_generator
from tread_zoo.testing import Probe

ROUTES = [{"start": 0, "end": 1}, {"start": 1, "end": 3}]


@pytest.fixture(scope="module")
def network():
    return Probe("dit_tiny", overrides=SMALL["dit_tiny"]).build()


def options_of(rate, guidance="none", routing=None):
    sampler = {"name": "euler", "num_steps": 3, "selection_rate": rate}
    trained = create("routing", routing or {"name": "tread", "routes": ROUTES})
    return replace(build_sampling(sampler, guidance), trained=trained)


def drawn(network, method, indices, seed, rate, evaluation):
    images = make_image_generator("sparse", seed, evaluation, images=indices)
    return method.sample(Stack.of(network), images, rate)


def draw(network, options, batch_size=3):
    labels = torch.tensor([0, 4, 1])
    return generate(
        network, FlowMatching(), options, indices=[5, 6, 9], labels=labels, seed=2,
        batch_size=batch_size,
    )  # fmt: skip


def test_both_branches_see_the_routes_of_their_evaluation(network):
    calls, guidance = [], {"name": "cfg", "scale": 2.0}
    hook = network.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["routes"]), with_kwargs=True
    )
    schedule = {"name": "tread", "routes": ROUTES, "selection_rate": ["linear", 0.5, 0.75]}
    options = options_of(0.5, guidance, schedule)
    images = draw(network, options)
    hook.remove()
    expected = [
        drawn(network, options.trained, [5, 6, 9], 2, 0.5, evaluation)
        for evaluation in range(3)
        for _ in ("weak", "strong")
    ]
    for call, routes in zip(calls, expected, strict=True):
        for one, other in zip(call, routes, strict=True):
            assert (one.start, one.end) == (other.start, other.end)
            assert torch.equal(one.ids, other.ids)
    torch.testing.assert_close(draw(network, options, batch_size=2), images)
    assert not torch.allclose(draw(network, options_of(0.25, guidance)), images)


def test_a_rate_of_zero_is_dense_to_the_bit(network):
    plain = build_sampling({"name": "euler", "num_steps": 3})
    assert torch.equal(draw(network, options_of(0.0)), draw(network, plain))


def test_flops_are_those_of_the_routed_network(network):
    for rate, kept in ((0.25, 18), (0.75, 6)):
        options = options_of(rate)
        routes = drawn(network, options.trained, [0], 0, rate, 0)
        assert {route.num_kept for route in routes} == {kept}
        cost = count_sampling(network, FlowMatching(), options)
        assert (cost.evaluations, cost.flops) == (3, 3 * count_flops(network, routes=routes))


@pytest.mark.parametrize(
    ("guidance", "routing"),
    [
        ("none", "none"),
        ({"name": "auto", "weak_checkpoint": "x"}, "tread"),
        ("none", "maskdit"),
        ("none", "microdit"),
        ("sparse", "tread"),
    ],
)
def test_what_training_did_not_show_is_refused(network, guidance, routing):
    with pytest.raises(ValueError, match=r"sampler\.selection_rate=0\.5"):
        options_of(0.5, guidance, routing).check(network, FlowMatching())


def test_a_rate_that_the_method_cannot_sample_at_is_refused_before_training(network):
    options = replace(options_of(0.9, routing="none"), routing="token_merging")
    with pytest.raises(ValueError, match=r"at most 0\.75"):
        options.check(network, FlowMatching())
    guidance = {"name": "sparse", "routing": "token_merging", "weak_rate": ["linear", 0.1, 0.9]}
    with pytest.raises(ValueError, match=r"at most 0\.75"):
        options_of(0.0, guidance, routing="none").check_training(network, 0.1)


def test_a_network_that_was_trained_without_routes_may_merge_tokens(network):
    options = options_of(0.5, routing="none")
    merged = draw(network, replace(options, routing={"name": "token_merging"}))
    assert not torch.allclose(merged, draw(network, replace(options, selection_rate=0.0)))
    assert torch.equal(merged, draw(network, replace(options, routing="token_merging")))
