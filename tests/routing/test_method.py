"""What a method's options mean, and what it chooses for a training step and a sample."""

import logging
from dataclasses import replace

import pytest
import torch

from tests.routing.test_selectors import SELECTORS
from tread_zoo import create
from tread_zoo.config import make_config
from tread_zoo.routing import Select, Skip, Stack, Step, bypassed_tokens, num_kept_tokens
from tread_zoo.seeding import make_image_generator

TWO = [{"start": 1, "end": 4}, {"start": 4, "end": 8}]


def stack(num_blocks=12, grid=(4, 6), **more):
    return Stack(num_blocks, grid, widths=(8,), skips={}, **more)


def images(batch, *key):
    return make_image_generator("test", *key, images=range(batch))


def drawn(method, given=None, batch=2, index=0, num_steps=1, **options):
    made = create("routing", method, **options)
    return made.draw(given or stack(), images(batch, index), Step(index, num_steps, 0))


@pytest.mark.parametrize(
    ("num_blocks", "ends", "expected"),
    [
        (12, (), (2, 8)),
        (28, (), (2, 24)),
        (12, (3, -1), (3, 11)),
        (12, (-6, 10), (6, 10)),
        (12, ("auto", 12), (2, 12)),
    ],
)
def test_start_and_end_count_as_in_slices(num_blocks, ends, expected):
    assert stack(num_blocks).span(*ends) == expected
    assert stack(default_range=(2, -2)).span() == (2, 10)


@pytest.mark.parametrize("num_blocks", [3, 4, 5, 6])
def test_default_range_fits_itself_to_a_small_depth_and_says_so(num_blocks, caplog):
    with caplog.at_level(logging.WARNING):
        create("routing", "tread").check(stack(num_blocks))
    start, end = stack(num_blocks).span()
    assert 1 <= start < end <= num_blocks - 1
    assert f"[{start}, {end})" in caplog.text


def test_several_routes_share_what_they_leave_out():
    routes = [TWO[0], {**TWO[1], "selection_rate": 0.75}]
    given = stack(grid=(4, 4), default_selector="rows")
    found = drawn("tread", given, selection_rate=0.25, routes=routes)
    assert [(r.start, r.end, r.num_kept) for r in found] == [(1, 4, 12), (4, 8, 4)]
    line = create("routing", "tread", selection_rate=0.25, routes=routes).describe(given)
    assert all(words in line for words in ("1 … 3 see 12 of 16", "4 … 7 see 4 of 16", "rows"))


def test_random_ltd_draws_for_each_block():
    found = drawn("random_ltd", selection_rate=0.5)
    assert [(r.start, r.end) for r in found] == [(i, i + 1) for i in range(1, 11)]
    assert not torch.equal(found[0].ids, found[1].ids)


@pytest.mark.parametrize("name", [*SELECTORS, "norm"])
def test_tokens_that_must_stay_do_and_the_rest_is_drawn(name):
    keep = torch.zeros(3, 24, dtype=torch.bool)
    keep[0, [0, 7]], keep[1, 23] = True, True
    seen, given = torch.zeros(3, 24, dtype=torch.bool), stack(keep=keep)
    for seed in range(20):
        route = given.select((2, 8), name, 12, images(3, seed))
        if name == "norm":  # of equal norms
            route = Select(2, 8, route.noise.topk(12, dim=1).indices.sort(dim=1).values)
        kept = ~bypassed_tokens([route], 3, 24)
        assert kept.sum(dim=1).tolist() == [num_kept_tokens(24, 0.5)] * 3
        assert kept[keep].all()
        seen |= kept
    assert seen.sum() > 60
    with pytest.raises(ValueError, match="keep has 13"):
        replace(given, keep=torch.arange(24)[None] < 13).select((2, 8), name, 12, images(1))


def test_draws_of_sampling_are_those_of_image_and_evaluation():
    method = create("routing", "tread", selection_rate=["linear", 0.5, 0.9])
    seen = set()
    for evaluation in range(40):
        (both,), (alone,) = (
            method.sample(
                stack(), make_image_generator("sparse", 5, evaluation, images=which), 0.25
            )
            for which in ([3, 8], [8])
        )
        assert torch.equal(both.ids[1:], alone.ids)
        assert both.num_kept == 18
        seen.add(tuple(both.ids.flatten().tolist()))
    assert len(seen) == 40
    assert method.sample(stack(), images(2), 0.0) == ()


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tread", {"selection_rate": 1.0}),
        ("tread", {"selection_rate": -0.1}),
        ("tread", {"start": 20}),
        ("sprint", {"start": 5, "end": 5}),
        ("layer_drop", {"end": 13}),
        ("maskdit", {"start": -13}),
        ("tread", {"selector": "row"}),
        ("tread", {"routes": [{"begin": 1}]}),
        ("tread", {"routes": [{"start": 2, "end": 6}, {"start": 5, "end": 8}]}),
        ("maskdit", {"selector": "norm"}),
        ("maskdit", {"selector": "norm", "selection_rate": ["linear", 0, 0.5]}),
        ("maskdit", {"reconstruction_weight": -1}),
        ("token_merging", {"rate": 0.9}),
        ("tread", {"selector": {"name": "blocks", "size": 7}}),
    ],
)
def test_what_cannot_work_is_refused(method, options):
    with pytest.raises(ValueError):
        create("routing", method, **options).check(stack())


def test_a_rate_that_begins_at_0_has_the_range_of_its_later_steps():
    method = create("routing", "tread", start=3, end=7, selection_rate=["linear", 0, 0.5])
    assert method.ranges(stack()) == [(3, 7)]


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("rejoin", "routing=sprint"),
        ("redraw", "random_ltd"),
        ("schedule", "selection_rate="),
        ("path_drop_probability", "routing.path_drop"),
        ("rate", "routing.selection_rate"),
    ],
)
def test_an_option_that_went_names_what_is_there_instead(option, instead):
    with pytest.raises(ValueError, match=instead):
        make_config(routing={option: 1})


@pytest.mark.slow
@pytest.mark.parametrize("path_drop", [0.0, 0.25])
def test_paths_are_dropped_as_often_as_asked(path_drop):
    steps = range(1000)
    found = [drawn("sprint", path_drop=path_drop, index=i, num_steps=1000) for i in steps]
    dropped = sum(isinstance(crossing, Skip) for (crossing,) in found)
    assert dropped == pytest.approx(1000 * path_drop, abs=200 * path_drop)  # 3.6 std


def test_layers_are_dropped_as_often_as_asked():
    options = {"drop": 0.25, "start": 2, "end": 6}
    found = [drawn("layer_drop", index=i, num_steps=1000, **options) for i in range(1000)]
    assert {(c.start, c.end) for each in found for c in each} == {(2, 6)}
    assert sum(map(len, found)) == pytest.approx(250, abs=50)
