import logging

import pytest
import torch

from tests.routing.test_selectors import SELECTORS
from tread_zoo.routing import PathDrop, build_routing
from tread_zoo.seeding import make_generator, make_image_generator


def ranges(num_blocks, **options):
    routing = build_routing("tread", num_blocks=num_blocks, **options)
    return [(plan.start, plan.end) for plan in routing.plans]


def test_none_has_no_routes():
    assert build_routing("none", num_blocks=12).plans == ()


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
    assert ranges(num_blocks, **options) == [expected]
    start, end = expected
    assert list(range(num_blocks))[start:end] == list(range(start, end))


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 6])
def test_default_range_fits_itself_to_a_small_depth_and_says_so(num_blocks, caplog):
    with caplog.at_level(logging.WARNING):
        ((start, end),) = ranges(num_blocks)
    assert 1 <= start < end <= num_blocks - 1
    assert f"[{start}, {end})" in caplog.text
    assert f"{num_blocks} blocks" in caplog.text


def test_several_routes_share_what_they_leave_out():
    routing = build_routing(
        "tread",
        num_blocks=12,
        selection_rate=0.25,
        default_selector="rows",
        routes=[{"start": 1, "end": 4}, {"start": 4, "end": 8, "selection_rate": 0.75}],
    )
    routes = routing.draw(2, (4, 4), make_generator("test"))
    assert [(r.start, r.end, r.num_kept) for r in routes] == [(1, 4, 12), (4, 8, 4)]
    assert [plan.selector_name for plan in routing.plans] == ["rows", "rows"]


@pytest.mark.parametrize("name", SELECTORS)
def test_a_shared_draw_is_one_draw_for_the_whole_batch(name):
    routing = build_routing("tread", num_blocks=12, selector=name, per_batch=True)
    generators = [make_image_generator("test", images=range(i, i + 5)) for i in (0, 5)]
    (route,), (other,) = (routing.draw(5, (6, 6), each) for each in generators)
    assert torch.equal(route.ids, route.ids[:1].expand(5, -1))
    assert torch.equal(route.ids, other.ids)  # on every rank


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
    ],
)
def test_what_cannot_work_is_refused(options):
    with pytest.raises(ValueError):
        build_routing("tread", num_blocks=12, **options)


def fused_routing(**options):
    return build_routing("tread", num_blocks=12, rejoin="project", **options)


def test_fused_ranges_are_those_of_the_routes():
    several = [{"start": 1, "end": 4}, {"start": 4, "end": 8}]
    assert fused_routing(routes=several).fused_ranges == ((1, 4), (4, 8))
    assert build_routing("tread", num_blocks=12).fused_ranges == ()
    assert build_routing("none", num_blocks=12).fused_ranges == ()


def test_paths_are_dropped_as_often_as_asked_all_at_once():
    routing = fused_routing(
        routes=[{"start": 1, "end": 4}, {"start": 4, "end": 8}], path_drop_probability=0.25
    )
    routes = routing.draw(2, (4, 4), make_generator("test"))
    drawn = [routing.drop_paths(routes, make_generator("test", step)) for step in range(1000)]
    dropped = [found for found in drawn if found != routes]
    assert 200 < len(dropped) < 300  # 250 expected, standard deviation 13.7
    assert set(dropped) == {(PathDrop(1, 4), PathDrop(4, 8))}
    assert drawn[7] == routing.drop_paths(routes, make_generator("test", 7))


def test_without_a_probability_and_without_routes_nothing_is_dropped():
    routing = fused_routing()
    routes = routing.draw(2, (4, 4), make_generator("test"))
    assert all(routing.drop_paths(routes, make_generator("t", s)) == routes for s in range(50))
    often = fused_routing(path_drop_probability=0.99)
    assert all(often.drop_paths((), make_generator("t", s)) == () for s in range(50))
