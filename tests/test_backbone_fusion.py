"""Fusions and dropped paths beside what the conformance kit holds every backbone to."""

import pytest
import torch

from tests.test_contract import SMALL
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.routing import PathDrop
from tread_zoo.testing import Probe
from tread_zoo.testing.probe import watching

SHALLOW = {
    "dit_tiny": {"hidden_size": 16, "depth": 3},
    "mamba_tiny": {"hidden_size": 16, "depth": 2, "state_size": 2},
}


def probe_of(name, sizes=SMALL):
    return Probe(name, overrides=sizes[name])


def widths_of(backbone, probe):
    return [stream.shape[-1] for stream in backbone.embed(*probe.inputs())[0]]


@pytest.mark.parametrize("name", SHALLOW)
def test_fusions_draw_nothing(name):
    backbone, state = probe_of(name).build(), torch.get_rng_state()
    backbone.add_fusions([(1, 2), (2, 3)])
    assert torch.equal(torch.get_rng_state(), state)
    assert backbone.fused_ranges == ((1, 2), (2, 3))


@pytest.mark.parametrize("ranges", [[(0, 5)], [(2, 2)], [(-1, 2)], [(1, 3), (2, 4)]])
def test_ranges_that_do_not_fit_are_refused(ranges):
    backbone = probe_of("dit_tiny").build()
    with pytest.raises(ValueError, match=r"disjoint, ascending, not empty.*4 blocks"):
        backbone.add_fusions(ranges)
    assert backbone.fused_ranges == ()


def test_routes_and_drops_that_do_not_fit_are_told():
    probe = probe_of("dit_tiny")
    plain, fused = probe.build(), probe.build_fused((1, 3))
    with pytest.raises(ValueError, match=r"path drop \[1, 3\): this network has no fusion.*rej"):
        plain(*probe.inputs(), routes=[PathDrop(1, 3)])
    for route in (probe.route(fused, 1, 2), PathDrop(1, 2)):
        with pytest.raises(ValueError, match=r"\[1, 2\) is none of the ranges.*\[1, 3\)"):
            fused(*probe.inputs(), routes=[route])
    with pytest.raises(ValueError, match="none of the ranges"):
        fused(*probe.inputs(), routes=[PathDrop(2, 2)])
    with pytest.raises(ValueError, match="starts before"):
        fused(*probe.inputs(), routes=[PathDrop(1, 3), PathDrop(1, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("name", SHALLOW)  # one stream, and two with skips
def test_fusions_and_drops_are_captured_in_whole_graphs(name):
    probe = probe_of(name, SHALLOW)
    backbone = probe.build_fused((1, 2))
    torch.compiler.reset()
    compiled = torch.compile(backbone, backend="eager")
    for routes in ((probe.route(backbone, 1, 2),), (PathDrop(1, 2),)):
        expected = backbone(*probe.inputs(), routes=routes, features=[0, 1])
        got = compiled(*probe.inputs(), routes=routes, features=[0, 1])
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", SHALLOW)
def test_flops_of_a_fusion_are_those_of_its_products(name):
    probe = probe_of(name)
    plain, fused = probe.build(), probe.build_fused((1, 3))
    length = plain.num_extra_tokens + plain.num_tokens
    price = sum(2 * length * 2 * width * width for width in widths_of(plain, probe))
    route = probe.route(plain, 1, 3, rate=0.5, batch=1)
    assert count_flops(fused) - count_flops(plain) == price
    assert count_flops(fused, routes=[route]) - count_flops(plain, routes=[route]) == price
    both = count_flops(fused, backward=True) - count_flops(plain, backward=True)
    assert both == 3 * price
    assert count_flops(fused, routes=[PathDrop(1, 3)]) < count_flops(fused, routes=[route])


def test_a_map_of_zeros_does_not_load_as_one_of_dense_values():
    """Their weights are of other inputs, and would pass in silence."""
    dense, zero = (
        probe_of("dit_tiny").build_fused((1, 3), bypassed=kind) for kind in ("dense", "zero")
    )
    with pytest.raises(RuntimeError, match="fusions"):
        zero.load_state_dict(dense.state_dict())


@torch.no_grad()
@pytest.mark.parametrize("name", SHALLOW)
def test_with_zero_for_the_bypassed_a_dropped_path_is_half_the_dense_streams(name):
    """And of a dense call the mean of both, as the map starts; `dense` would add the update."""
    probe = probe_of(name)
    backbone = probe.build_fused((1, 2), fresh=True, bypassed="zero")
    for routes, weight in (([PathDrop(1, 2)], 0.0), ([], 0.5)):
        with watching(backbone) as seen:
            backbone(*probe.inputs(), routes=routes)
        after = seen[-1 if routes else 1].after if weight else seen[0].after
        given = next(call for call in seen if call.block == 2).before
        for before, end, stream in zip(seen[0].after, after, given, strict=True):
            torch.testing.assert_close(stream, 0.5 * before + weight * end)


@pytest.mark.parametrize("name", SMALL)
def test_importance_is_that_of_the_fused_network(name):
    """What `norm` keeps tokens by is what a route's first block is given, fusions before it too."""
    probe = probe_of(name)
    backbone = probe.build_fused((1, 2), (2, 4))
    with torch.no_grad(), watching(backbone) as seen:
        backbone(*probe.inputs())
    for start in range(backbone.num_blocks):  # block 3 lies within a fused range
        tokens = seen[start].before[0][:, backbone.num_extra_tokens :]
        found = backbone.importance(*probe.inputs(), start)
        torch.testing.assert_close(found, tokens.norm(dim=-1))
