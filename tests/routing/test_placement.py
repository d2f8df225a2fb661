"""Where to route: the measures against other formulas, planted still blocks, the states."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from scripts.probe_routes import ProbeConfig, describe, probe, token_states
from tests.test_contract import SMALL
from tread_zoo import create, create_backbone
from tread_zoo.data import digits
from tread_zoo.evaluation.flops import count_flops
from tread_zoo.fields import check
from tread_zoo.routing import NO_ROUTING, build_routing
from tread_zoo.routing.placement import propose_route, similarity
from tread_zoo.seeding import make_generator
from tread_zoo.testing import Probe


def options(**changes):
    given = {"checkpoint": "x", "num_images": 6, "num_levels": 2, "batch_size": 4}
    return check(ProbeConfig, {**given, **changes})


def run_of(backbone, *, data=None, objective="flow"):
    """Return what a checkpoint of a network gives back."""
    return SimpleNamespace(
        backbone=backbone, objective=create("objective", objective), has_data=data is not None,
        data=lambda changes: data, precision="fp32", routing=NO_ROUTING,
        checkpoint=SimpleNamespace(step=7),
    )  # fmt: skip


def cosine(x, y):
    return torch.cosine_similarity(x, y, dim=-1).mean()


def cka(x, y):
    """From HSIC(K, L) = tr(K H L H), with H the centring matrix (arXiv 1905.00414, equation 3)."""
    centre = torch.eye(30, dtype=torch.float64) - 1 / 30

    def hsic(x, y):
        return torch.trace(x @ x.T @ centre @ y @ y.T @ centre)

    return hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt()


@pytest.mark.parametrize("measure", [cosine, cka])
def test_a_measure_is_its_formula(measure):
    found = torch.randn(4, 30, 8, generator=make_generator("states")) + 0.5
    expected = torch.stack([measure(x, y) for x in found.double() for y in found.double()])
    measured = similarity(found, measure.__name__).flatten().double()
    torch.testing.assert_close(measured, expected, atol=0, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "skips", "expected"),
    [
        ([0, 0, 0, 0, 0, 0], {}, (1, 5)),
        ([0, 9, 1, 1, 1, 9, 9, 0], {}, (2, 5)),
        ([0, 1, 1, 1, 6, 1, 9, 9], {}, (1, 4)),
        ([0, 1, 1, 4, 1, 1, 9, 9, 9, 9, 0], {}, (1, 6)),  # one stronger block between weak ones
        ([0, 9, 1, 1, 1, 9, 0], {6: 0, 5: 1, 4: 2}, (2, 5)),
        ([0, 1, 1, 1, 9, 9, 9], {6: 0, 5: 1, 4: 2}, (3, 4)),  # alone leaves every skip whole
    ],
)
def test_the_rule(changes, skips, expected):
    found = propose_route(changes, skips)
    assert (found.start, found.end) == expected
    middle = changes[1:-1]
    gain = (found.end - found.start) * sum(middle) / len(middle) - sum(changes[slice(*expected)])
    assert found.gain == pytest.approx(gain)


@pytest.mark.parametrize("measure", ["cosine", "cka"])
@pytest.mark.parametrize("name", SMALL)
def test_planted_still_blocks_are_found(name, measure):
    """In the middle, as networks with long skips need it. Other blocks move each token."""
    sizes = {**SMALL[name], "depth": 8 if name in ("mamba_tiny", "mamba2_tiny", "uvit_tiny") else 9}
    backbone = Probe(name, input_size=(8, 8), in_channels=1, overrides=sizes).build()
    assert backbone.num_blocks == 9

    def moved(stream, index):
        noise = torch.randn(stream.shape, generator=make_generator("moves", index))
        return 0.8 * stream + 0.6 * stream.norm(dim=-1, keepdim=True) * F.normalize(noise, dim=-1)

    def run_block(index, streams, *others):
        return streams if index in range(3, 6) else tuple(moved(each, index) for each in streams)

    backbone.run_block = run_block
    _, states, _ = token_states(run_of(backbone), options(measure=measure))
    each = torch.stack([similarity(some, measure) for some in states])
    changes = (1 - each.mean(dim=0).diagonal(offset=1)).tolist()
    route = propose_route(changes, backbone.skips)
    assert (route.start, route.end) == (3, 6)
    assert all(changes[block] > 0.01 for block in (1, 2, 6, 7))
    assert changes[3:6] == pytest.approx([0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("objective", ["flow", "edm"])
@pytest.mark.parametrize("from_data", [True, False])
def test_images_and_samples_are_measured_at_the_objectives_levels(objective, from_data):
    backbone = create_backbone(
        "dit_tiny", input_size=8, in_channels=1, num_classes=10, depth=4, hidden_size=16
    )
    run = run_of(backbone, data=digits() if from_data else None, objective=objective)
    levels, found, source = token_states(run, options(num_levels=3, max_tokens=50))
    assert levels == run.objective.levels(3)[:-1].tolist()
    assert source.startswith("6 held-out images" if from_data else "6 samples")
    assert [state.shape for state in found] == 3 * [(5, 6 * (50 // 6), 16)]
    _, again, _ = token_states(run, options(num_levels=3, max_tokens=50, batch_size=6))
    for one, other in zip(found, again, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_the_saving_is_that_of_a_routed_step():
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 0, "hidden_size": 16, "depth": 6}
    backbone, fused = (create_backbone("dit_tiny", **sizes) for _ in range(2))
    fused.add_fusions([(2, 4)])
    given = options(num_images=2, num_levels=1, selection_rate=0.75)
    for network in (backbone, fused):
        record = probe(run_of(network), given)
        route = record["route"]
        routing = build_routing(
            "tread", num_blocks=6, selection_rate=0.75, start=route["start"], end=route["end"]
        )
        routes = routing.draw(1, backbone.grid, make_generator("any"))
        routed = count_flops(backbone, routes=routes, backward=True)
        dense = count_flops(backbone, backward=True)
        assert (route["flops_routed"], record["flops_dense"]) == (routed, dense)
        assert route["saving"] == 1 - routed / dense
    assert f"routing.start={route['start']}" in "\n".join(describe(record))


def test_idle_blocks_are_warned_of():
    """All blocks of a new network are the identity."""
    sizes = {"input_size": 8, "in_channels": 1, "num_classes": 10, "hidden_size": 16, "depth": 8}
    record = probe(run_of(create_backbone("dit_tiny", **sizes), data=digits()), options())
    text = "\n".join(describe(record))
    assert (
        "blocks 2 … 3 change the output by 0 %: this network may be little more than its 6" in text
    )
