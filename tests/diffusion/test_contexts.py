"""Guidance and FLOPs where the condition is a context: the weak branch sees zeros."""

import pytest
import torch

from tread_zoo import create_backbone
from tread_zoo.diffusion import (
    AutoGuidance,
    ClassifierFree,
    Euler,
    FlowMatching,
    IntervalGuidance,
    NoGuidance,
    PathDropGuidance,
    SamplingOptions,
    SparseGuidance,
    check_weak,
    generate,
    initial_noise,
)
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.factory import add_routing
from tread_zoo.registry import create
from tread_zoo.routing import Select

T, S, WIDTH, DEPTH = 3, 5, 16, 4


def network(seed=0, **overrides):
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "depth": DEPTH, "num_heads": 2, "input_size": 8}
    context = {"context_length": T, "context_size": S}
    return create_backbone(
        "uvit_tiny", **{**sizes, "in_channels": 2, "num_classes": 0, **context, **overrides}
    )


def contexts(count=4):
    return torch.randn(count, T, S, generator=torch.Generator().manual_seed(1))


def draw(net, guidance, labels, num_steps=1, trained=None, **more):
    trained = trained or create("routing", "tread")
    options = SamplingOptions(Euler(), num_steps, guidance=guidance, trained=trained)
    return generate(
        net, FlowMatching(), options, indices=range(len(labels)), labels=labels, seed=3,
        **{"batch_size": 8, **more},
    )  # fmt: skip


@torch.no_grad()
def test_every_guidance_is_its_formula_with_zeros_for_no_context():
    """One Euler step of flow matching from t = 1 to 0 is x - velocity, the network's output."""
    net, y = network(), contexts()
    x, t = initial_noise((2, 8, 8), 3, range(4)), torch.ones(4)
    strong, null = net(x, t, y), net(x, t, torch.zeros_like(y))
    assert (strong - null).abs().max() > 1e-3
    for guidance, expected in (
        (NoGuidance(), strong),
        (ClassifierFree(scale=3.0), null + 3 * (strong - null)),
        (ClassifierFree(scale=0.0), null),
        (IntervalGuidance(scale=3.0, low=0.5, high=1.0), null + 3 * (strong - null)),
        (IntervalGuidance(scale=3.0, low=0.0, high=0.5), strong),
    ):
        torch.testing.assert_close(draw(net, guidance, y), x - expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        draw(net, NoGuidance(), torch.zeros_like(y)), x - null, atol=1e-5, rtol=1e-5
    )
    weak = network(seed=1)
    guided = draw(net, AutoGuidance(scale=2.0, weak_checkpoint="x"), y, weak=weak)
    expected = x - (2 * strong - weak(x, t, y))  # the weak one with the context, too
    torch.testing.assert_close(guided, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(draw(net, SparseGuidance(scale=1.0), y), draw(net, NoGuidance(), y))
    sparse = draw(net, SparseGuidance(scale=2.0), y)
    assert not torch.equal(sparse, draw(net, SparseGuidance(scale=2.0), -y))
    sprint = create("routing", "sprint", start=1, end=3)
    add_routing(net, sprint)
    assert torch.isfinite(draw(net, PathDropGuidance(), y, num_steps=2, trained=sprint)).all()


def test_an_image_is_a_function_of_its_number_and_its_context():
    net, y = network(), contexts()
    together = draw(net, ClassifierFree(), y, num_steps=3)
    apart = draw(net, ClassifierFree(), y, num_steps=3, batch_size=1)
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_flops_count_the_context_tokens():
    """As many registers, and the linear map of the embeddings."""
    registers = network(context_length=0, context_size=0, num_registers=T)
    routes = [Select(1, 4, torch.arange(4)[None])]
    cost, expected = (count_flops(net, routes=routes) for net in (network(), registers))
    assert cost == expected + 2 * T * S * WIDTH


def test_conditions_that_do_not_fit_are_refused():
    net = network()
    for wrong in (contexts()[:, 1:], contexts().long(), torch.zeros(4, dtype=torch.int64)):
        with pytest.raises(ValueError):
            draw(net, NoGuidance(), wrong)
    with pytest.raises(ValueError, match=r"contexts"):
        check_weak(net, FlowMatching(), network(context_length=2), FlowMatching())
