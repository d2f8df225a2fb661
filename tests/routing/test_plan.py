"""What a configuration says of routes, and what a step and a sample draw of it."""

import logging

import pytest
import torch

from tests.routing.test_selectors import SELECTORS
from tread_zoo.config import make_config
from tread_zoo.routing import Bypass, PathDrop, build_routing, bypassed_tokens, num_kept_tokens
from tread_zoo.seeding import make_generator, make_image_generator

GRID = (4, 6)
TWO = [{"start": 1, "end": 4}, {"start": 4, "end": 8}]


def build(num_blocks=12, **options):
    return build_routing("tread", num_blocks=num_blocks, **options)


@pytest.mark.parametrize(
    ("num_blocks", "options", "expected"),
    [
        (12, {}, (2, 8)),
        (28, {}, (2, 24)),
        (12, {"start": 3, "end": -1}, (3, 11)),
        (12, {"start": -6, "end": 10}, (6, 10)),
        (12, {"end": 12}, (2, 12)),
        (12, {"default_range": (2, -2)}, (2, 10)),
    ],
)
def test_start_and_end_count_as_in_slices(num_blocks, options, expected):
    assert build(num_blocks, **options).ranges == (expected,)


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 6])
def test_default_range_fits_itself_to_a_small_depth_and_says_so(num_blocks, caplog):
    with caplog.at_level(logging.WARNING):
        ((start, end),) = build(num_blocks).ranges
    assert 1 <= start < end <= num_blocks - 1
    assert f"[{start}, {end})" in caplog.text


def test_several_routes_share_what_they_leave_out():
    given = [TWO[0], {**TWO[1], "selection_rate": 0.75}]
    routing = build(selection_rate=0.25, default_selector="rows", routes=given)
    routes = routing.draw(2, (4, 4), make_generator("test"))
    assert [(r.start, r.end, r.num_kept) for r in routes] == [(1, 4, 12), (4, 8, 4)]
    assert [plan.selector_name for plan in routing.plans] == ["rows", "rows"]


@pytest.mark.parametrize("name", SELECTORS)
def test_a_shared_draw_is_one_draw_for_the_batch_of_all_ranks(name):
    routing = build(selector=name, per_batch=True)
    generators = [make_image_generator("test", images=range(i, i + 5)) for i in (0, 5)]
    (route,), (other,) = (routing.draw(5, (6, 6), each) for each in generators)
    assert torch.equal(route.ids, route.ids[:1].expand(5, -1))
    assert torch.equal(route.ids, other.ids)


def test_redraw_is_one_route_for_each_block():
    short = build(start=2, end=5, redraw=True, detach=True)
    long = build(detach=True, routes=[{"start": i, "end": i + 1} for i in (2, 3, 4)])
    drawn, expected = (each.draw(2, GRID, make_generator("test")) for each in (short, long))
    for one, other in zip(drawn, expected, strict=True):
        assert (one.start, one.end, one.bypass) == (other.start, other.end, Bypass(detach=True))
        assert torch.equal(one.ids, other.ids)
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
    with pytest.raises(ValueError, match="force_keep"):
        plan.draw(1, GRID, make_generator("test"), torch.arange(24)[None] < 13)


def test_draws_of_sampling_are_those_of_image_and_evaluation():
    routing = build(schedule="linear", final_rate=0.9, carry_from=1, detach=True)
    both, alone = (routing.draw_by_evaluation(GRID, 5, indices) for indices in ([3, 8], [8]))
    draws = [(*both(0.25, k), *alone(0.25, k)) for k in range(40)]
    for route, other in draws:
        assert torch.equal(route.ids[1:], other.ids)
        assert (route.num_kept, route.bypass) == (18, Bypass(1, True))
    assert both(0.0, 0) == ()
    assert len({tuple(route.ids.flatten().tolist()) for route, _ in draws}) == 40


@pytest.mark.parametrize(
    "options",
    [
        {"selection_rate": 1.0},
        {"selection_rate": -0.1},
        {"start": 20},
        {"start": 5, "end": 5},
        {"end": 13},
        {"start": -13},
        {"selector": "row"},
        {"routes": [{"begin": 1}]},
        {"routes": [{"start": 2, "end": 6}, {"start": 5, "end": 8}]},
        {"carry_from": 3, "start": 2},
        {"routes": [{"start": 2, "end": 5}, {"start": 6, "end": 8, "carry_from": 3}]},
    ],
)
def test_what_cannot_work_is_refused(options):
    with pytest.raises(ValueError):
        build(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"rejoin": "mask", "detach": True},
        {"rejoin": "mask", "routes": [{"redraw": True}]},
        {"rejoin": "mask", "carry_from": 0},
        {"reconstruction_weight": -1},
        {"rate_range": [0.25, 0.75]},
    ],
)
def test_a_configuration_names_what_does_not_go_together(options):
    with pytest.raises(ValueError, match=r"routing\."):
        make_config(routing=options)


def test_learned_ranges_are_those_of_the_routes():
    for rejoin, fused, masked in (("project", 2, 0), ("mask", 0, 2), ("replace", 0, 0)):
        routing = build(rejoin=rejoin, routes=TWO)
        assert routing.fused_ranges == ((1, 4), (4, 8))[:fused]
        assert routing.masked_ranges == ((1, 4), (4, 8))[:masked]
    assert build_routing("none", num_blocks=12).plans == ()


@pytest.mark.parametrize("probability", [0.0, 0.25])
def test_paths_are_dropped_as_often_as_asked_all_at_once(probability):
    routing = build(rejoin="project", routes=TWO, path_drop_probability=probability)
    routes = routing.draw(2, (4, 4), make_generator("test"))
    drawn = [routing.drop_paths(routes, make_generator("test", step)) for step in range(1000)]
    dropped = [each for each in drawn if each != routes]
    assert len(dropped) == pytest.approx(1000 * probability, abs=200 * probability)  # 3.6 std
    assert set(dropped) <= {(PathDrop(1, 4), PathDrop(4, 8))}
    assert drawn[7] == routing.drop_paths(routes, make_generator("test", 7))
