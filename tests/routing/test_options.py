"""What a route is made of, as a configuration says it and as a step draws it."""

import pytest
import torch

from tests.routing.test_selectors import SELECTORS
from tread_zoo.config import make_config
from tread_zoo.routing import Bypass, build_routing, bypassed_tokens, num_kept_tokens
from tread_zoo.seeding import make_generator

GRID = (4, 6)


def build(**options):
    return build_routing("tread", num_blocks=12, **options)


def test_a_rate_range_draws_each_step_from_its_even_steps():
    routing = build(rate_range=[0.25, 0.75], routes=[{"end": 5}, {"start": 5, "end": 8}])
    rates = []
    for step in range(400):
        plans = routing.at(step, 400, seed=3).plans
        assert plans == routing.at(step, 400, seed=3).plans  # whoever asks
        rates += {plan.selection_rate for plan in plans}  # one for both routes
    steps = torch.linspace(0.25, 0.75, 17, dtype=torch.float64)
    places = (torch.tensor(rates, dtype=torch.float64)[:, None] - steps).abs()
    assert len(rates) == 400
    assert places.min(dim=1).values.max() < 1e-9
    counts = torch.bincount(places.argmin(dim=1), minlength=17)
    assert counts.min() > 8  # 23.5 expected, standard deviation 4.7
    assert counts.max() < 45
    assert rates != [routing.at(step, 400, seed=4).plans[0].selection_rate for step in range(400)]


def test_a_rate_of_zero_is_no_route_and_a_range_keeps_to_the_dense_ends():
    routing = build(rate_range=[0, 0.5], dense_tail=0.5)
    numbers = [len(routing.at(step, 200, 0).plans) for step in range(200)]
    assert set(numbers[:100]) == {0, 1}
    assert set(numbers[100:]) == {0}


def test_redraw_is_one_route_for_each_block():
    short = build(start=2, end=5, redraw=True, detach=True)
    long = build(detach=True, routes=[{"start": i, "end": i + 1} for i in (2, 3, 4)])
    drawn, expected = (each.draw(2, GRID, make_generator("test")) for each in (short, long))
    for route, other in zip(drawn, expected, strict=True):
        assert (route.start, route.end, route.bypass) == (
            other.start,
            other.end,
            Bypass(None, True),
        )
        assert torch.equal(route.ids, other.ids)
    assert not torch.equal(drawn[0].ids, drawn[1].ids)


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("name", [*SELECTORS, "norm"])
def test_forced_tokens_stay_and_the_rest_is_drawn(name, per_batch):
    plan = build(selector=name, per_batch=per_batch, selection_rate=0.5).plans[0]
    force = torch.zeros(3, 24, dtype=torch.bool)
    force[0, [0, 7]], force[1, 23] = True, True
    seen = torch.zeros(3, 24, dtype=torch.bool)
    for seed in range(20):
        route = plan.draw(3, GRID, make_generator("test", seed), force)
        if name == "norm":
            route = route.resolve(torch.ones(3, 24))
        kept = ~bypassed_tokens([route], 3, 24)
        assert kept.sum(dim=1).tolist() == [num_kept_tokens(24, 0.5)] * 3
        assert kept[force.any(0).expand_as(force) if per_batch else force].all()
        seen |= kept
    assert seen.sum() > 60
    with pytest.raises(ValueError, match="force_keep holds 13"):
        plan.draw(1, GRID, make_generator("test"), torch.arange(24)[None] < 13)


def test_draws_of_sampling_are_those_of_image_and_evaluation():
    routing = build(rate_range=[0, 0.9], carry_from=1, detach=True)
    both, alone = (routing.draw_by_evaluation(GRID, 5, indices) for indices in ([3, 8], [8]))
    draws = [(*both(0.25, k), *alone(0.25, k)) for k in range(40)]
    for route, other in draws:
        assert torch.equal(route.ids[1:], other.ids)
        assert (route.num_kept, route.bypass) == (18, Bypass(1, True))
    assert both(0.0, 0) == ()
    assert len({tuple(route.ids.flatten().tolist()) for route, _ in draws}) == 40


@pytest.mark.parametrize(
    "routing",
    [
        {"rate_range": [0.5, 1.0]},
        {"rejoin": "mask", "detach": True},
        {"rejoin": "mask", "routes": [{"redraw": True}]},
        {"rejoin": "mask", "carry_from": 0},
        {"reconstruction_weight": -1},
    ],
)
def test_what_does_not_go_together_is_refused(routing):
    with pytest.raises(ValueError, match=r"routing\."):
        make_config(routing=routing)


def test_a_route_of_its_own_kind_leaves_the_common_schedule():
    routing = build(
        schedule="linear", final_rate=0.0,
        routes=[{"end": 5, "rate_range": [0.1, 0.5]}, {"start": 5, "end": 8}],
    )  # fmt: skip
    first, second = routing.plans
    assert (first.rate_range, first.schedule) == ((0.1, 0.5), None)
    assert (second.rate_range, second.schedule.name) == (None, "linear")
