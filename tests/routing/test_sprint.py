"""SPRINT's fusion beside what the kit holds every method to."""

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo import create
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.factory import add_routing
from tread_zoo.routing import Skip
from tread_zoo.testing import Probe
from tread_zoo.testing.probe import output_and_gradients, watching

SHALLOW = {
    "dit_tiny": {"hidden_size": 16, "depth": 3},
    "mamba_tiny": {"hidden_size": 16, "depth": 2, "state_size": 2},
}


def sprint(start=1, end=2, absent="dense"):
    return create("routing", "sprint", start=start, end=end, absent=absent)


def probe_of(name, sizes=SMALL):
    return Probe(name, overrides=sizes[name])


@pytest.mark.parametrize("name", SHALLOW)
def test_with_dense_values_it_starts_as_rejoining_unchanged(name):
    """Up to rounding, in outputs and gradients, dense and routed."""
    probe = probe_of(name)
    backbone = probe.build()
    calls = ((), (probe.route(backbone, 1, 3, rate=0.5),))
    plain = [output_and_gradients(backbone, probe.inputs(), routes) for routes in calls]
    add_routing(backbone, sprint(1, 3))
    for routes, (out, grads) in zip(calls, plain, strict=True):
        fused, fused_grads = output_and_gradients(backbone, probe.inputs(), routes)
        torch.testing.assert_close(fused, out, atol=1e-5, rtol=1e-4)
        for weight, grad in grads.items():
            torch.testing.assert_close(fused_grads[weight], grad, atol=1e-5, rtol=1e-3, msg=weight)


def test_a_network_has_one_method_and_routes_where_it_learned_to():
    probe = probe_of("dit_tiny")
    fused = probe.build_routed(sprint(1, 3))
    with pytest.raises(ValueError, match="sprint"):
        add_routing(fused, sprint(1, 3))
    with pytest.raises(ValueError, match=r"\[1, 2\).*\[1, 3\)"):
        fused(*probe.inputs(), routes=[probe.route(fused, 1, 2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHALLOW)  # one stream, and two with skips
def test_fusions_and_drops_are_captured_in_whole_graphs(name):
    probe = probe_of(name, SHALLOW)
    backbone = probe.build_routed(sprint())
    torch.compiler.reset()
    compiled = torch.compile(backbone, backend="eager")
    for routes in ((probe.route(backbone, 1, 2),), (Skip(1, 2),)):
        expected = backbone(*probe.inputs(), routes=routes, features=[0, 1])
        got = compiled(*probe.inputs(), routes=routes, features=[0, 1])
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHALLOW)
def test_flops_of_a_fusion_are_those_of_its_products(name):
    probe = probe_of(name)
    plain, fused = probe.build(), probe.build_routed(sprint(1, 3))
    length = plain.num_extra_tokens + plain.num_tokens
    price = sum(2 * length * 2 * width * width for width in plain.widths)
    route = probe.route(plain, 1, 3, rate=0.5, batch=1)
    assert count_flops(fused) - count_flops(plain) == price
    assert count_flops(fused, routes=[route]) - count_flops(plain, routes=[route]) == price
    both = count_flops(fused, backward=True) - count_flops(plain, backward=True)
    assert both == 3 * price
    assert count_flops(fused, routes=[Skip(1, 3)]) < count_flops(fused, routes=[route])


@torch.no_grad()
@pytest.mark.parametrize("absent", ["zero", "token"])
@pytest.mark.parametrize("name", SHALLOW)
def test_the_map_starts_at_the_mean_of_both_ends(name, absent):
    """For a dropped path: of the dense streams, and of their replacement."""
    probe = probe_of(name)
    backbone = probe.build_routed(sprint(absent=absent), fresh=True)
    for routes in ([Skip(1, 2)], []):
        with watching(backbone) as seen:
            backbone(*probe.inputs(), routes=routes)
        dense = seen[0].after
        after = backbone.routing.absent(dense) if routes else seen[1].after
        given = next(call for call in seen if call.block == 2).before
        for before, end, stream in zip(dense, after, given, strict=True):
            torch.testing.assert_close(stream, 0.5 * before + 0.5 * end)


def test_the_token_is_drawn_once_saved_and_not_trained():
    probe = probe_of("mamba_tiny")
    one, other = (probe.build_routed(sprint(absent="token"), seed=seed) for seed in (0, 1))
    names = [name for name, _ in one.named_parameters() if "token" in name]
    assert names == []
    assert one.routing.token_1.std() == pytest.approx(0.02, rel=0.5)
    assert not torch.equal(one.routing.token_0, other.routing.token_0)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.routing.token_0, other.routing.token_0)
