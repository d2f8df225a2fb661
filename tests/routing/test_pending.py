"""Keeping tokens by importance: the right chances, drawn in advance, resolved without a draw."""

import itertools

import pytest
import torch
from tread_zoo.routing.pending import draw_gumbel

from tread_zoo import create_backbone
from tread_zoo.routing import PendingRoute, build_routing, num_kept_tokens, resolve_routes
from tread_zoo.seeding import make_generator, make_image_generator
from tread_zoo.testing import Probe


def pending(batch, num_tokens, num_kept, seed=0):
    generator = make_image_generator("test pending", seed, images=range(batch))
    return PendingRoute(1, 3, num_kept, draw_gumbel(num_tokens, generator))


def chances(weights, num_kept):
    """Return each token's chance to be among `num_kept` drawn one by one, by enumeration."""
    found = [0.0] * len(weights)
    for drawn in itertools.permutations(range(len(weights)), num_kept):
        chance, left = 1.0, sum(weights)
        for token in drawn:
            chance *= weights[token] / left
            left -= weights[token]
        for token in drawn:
            found[token] += chance
    return torch.tensor(found)


@pytest.mark.parametrize("num_kept", [1, 2, 3, 4])
def test_tokens_stay_with_the_chances_of_drawing_without_replacement(num_kept):
    weights = [4.0, 1.0, 2.0, 0.5, 1.0]
    route = pending(40000, 5, num_kept).resolve(torch.tensor(weights).expand(40000, 5))
    share = torch.zeros(5).index_add(0, route.ids.flatten(), torch.ones(40000 * num_kept)) / 40000
    torch.testing.assert_close(share, chances(weights, num_kept), atol=0.012, rtol=0)


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.625, 0.75])
@pytest.mark.parametrize("grid", [(8, 8), (5, 7)])
def test_ids_are_sorted_unique_and_exactly_k(rate, grid):
    num_tokens = grid[0] * grid[1]
    num_kept = num_kept_tokens(num_tokens, rate)
    importance = torch.rand(6, num_tokens) * torch.logspace(-30, 3, num_tokens)
    importance[:, 1] = 0.0
    route = pending(6, num_tokens, num_kept).resolve(importance)
    assert route.ids.shape == (6, num_kept)
    assert (route.ids[:, 1:] > route.ids[:, :-1]).all()
    assert route.ids.max() < num_tokens


def test_one_draw_for_the_batch_goes_by_the_mean_importance():
    routing = build_routing("tread", num_blocks=12, selector="norm", per_batch=True)
    (route,) = routing.draw(4, (4, 4), make_generator("test"))
    assert route.noise.shape == (1, 16)
    importance = torch.rand(4, 16)
    ids = route.resolve(importance).ids
    assert (ids == ids[0]).all()
    alone = PendingRoute(2, 8, 8, route.noise).resolve(importance.mean(0, keepdim=True))
    assert torch.equal(ids[:1], alone.ids)


def test_concrete_routes_pass_through_and_each_start_is_asked_for():
    routing = build_routing(
        "tread",
        num_blocks=12,
        routes=[{"start": 1, "end": 4}, {"start": 5, "end": 7, "selector": "norm"}],
    )
    drawn = routing.draw(2, (4, 4), make_generator("test"))
    asked = []

    def importance(start):
        asked.append(start)
        return torch.ones(2, 16)

    first, second = resolve_routes(drawn, importance)
    assert first is drawn[0]
    assert (second.start, second.end, second.num_kept) == (5, 7, 8)
    assert asked == [5]


def test_importance_leaves_gradients_alone_under_autocast():
    backbone = Probe("dit_tiny").build()
    inputs = Probe("dit_tiny").inputs()
    grads = []
    for look in (False, True):
        backbone.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if look:
                assert backbone.importance(*inputs, 2).dtype == torch.float32
            out = backbone(*inputs)
        out.float().square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in backbone.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_network_that_is_given_a_pending_route_says_what_to_do():
    backbone = create_backbone("dit_tiny", input_size=8, in_channels=1, num_classes=10)
    x, t = torch.randn(2, 1, 8, 8), torch.rand(2)
    with pytest.raises(ValueError, match=r"route \[1, 3\) keeps .* resolve_routes"):
        backbone(x, t, routes=[pending(2, 16, 8)])
    with pytest.raises(ValueError, match=r"importance has shape \[3, 16\]; expected \[2, 16\]"):
        pending(2, 16, 8).resolve(torch.ones(3, 16))
    with pytest.raises(ValueError, match="start=13 is not in 0 … 12"):
        backbone.importance(x, t, None, 13)
