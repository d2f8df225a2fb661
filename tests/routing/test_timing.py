"""Rates that change: which rate each step has, when nothing is routed, and what cannot work."""

import itertools
import math

import pytest

from tests.routing.test_method import drawn, stack
from tread_zoo import create

STEPS = 1000


def rates(num_steps=STEPS, **options):
    """Return the rate of each step, None where the step is dense."""
    method = create("routing", "tread", **options)
    found = [None] * num_steps
    for steps, _, crossings in method.variants(stack(grid=(40, 50)), num_steps):
        if crossings:
            rate = 1 - crossings[0].num_kept / 2000
            found[steps.start : steps.stop] = [rate] * len(steps)
    return found


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize(("first", "last"), [(0.75, 0.25), (0.1, 0.7)])
@pytest.mark.parametrize(("warm", "tail"), [(0.0, 0.0), (0.1, 0.2)])
def test_linear_and_cosine_follow_their_curve_by_small_stairs(name, first, last, warm, tail):
    found = rates(selection_rate=[name, first, last], warm_start=warm, dense_tail=tail)
    begin, end = round(warm * STEPS), STEPS - round(tail * STEPS)
    assert found[:begin] == [None] * begin
    assert found[end:] == [None] * (STEPS - end)
    routed = found[begin:end]
    assert (routed[0], routed[-1]) == pytest.approx((first, last))
    levels = sorted(set(routed))
    height = max(b - a for a, b in itertools.pairwise(levels))
    assert height <= 1 / 16 + 1e-3
    assert len(levels) <= 17
    for step, rate in enumerate(routed):
        part = step / (end - begin - 1)
        part = part if name == "linear" else (1 - math.cos(math.pi * part)) / 2
        assert abs(rate - first - (last - first) * part) <= height / 2 + 1e-3, step


def test_steps_hold_each_rate_from_its_fraction_on():
    found = rates(10, selection_rate=["steps", 0.75, [0.3, 0.5], [0.6, 0.0], [0.8, 0.25]])
    assert found == [0.75] * 3 + [0.5] * 3 + [None] * 2 + [0.25] * 2


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_a_short_run_ends_at_the_final_rate(num_steps):
    found = rates(num_steps, selection_rate=["linear", 0.75, 0.25])
    assert found[-1] == 0.25
    assert found == sorted(found, reverse=True)


def test_each_step_draws_what_its_variant_counts():
    options = {"selection_rate": ["cosine", 0.7, 0.0], "warm_start": 0.1, "dense_tail": 0.2}
    method, next_step = create("routing", "tread", **options), 0
    for steps, weight, crossings in method.variants(stack(), 97):
        assert (steps.start, weight) == (next_step, 1)
        next_step = steps.stop
        for step in steps:
            found = drawn("tread", index=step, num_steps=97, **options)
            assert [r.num_kept for r in found] == [r.num_kept for r in crossings]
    assert next_step == 97


@pytest.mark.slow
def test_probability_is_decided_by_seed_and_step_alone():
    found = [bool(drawn("tread", index=i, num_steps=STEPS, probability=0.3)) for i in range(STEPS)]
    assert sum(found) / STEPS == pytest.approx(0.3, abs=0.06)  # four standard deviations
    longer = [bool(drawn("tread", index=i, num_steps=5000, probability=0.3)) for i in range(50)]
    assert longer == found[:50]


def test_routes_have_rates_of_their_own():
    routes = [
        {"start": 1, "end": 3},
        {"start": 3, "end": 5, "selection_rate": 0.75},
        {"start": 5, "end": 8, "selection_rate": ["steps", 0.5, [0.5, 0.125]]},
        {"start": 8, "end": 9, "selection_rate": ["cosine", 0.25, 0.0]},
    ]
    options = {"selection_rate": ["linear", 0.5, 0.25], "dense_tail": 0.2, "routes": routes}
    early, late = (
        {
            (r.start, r.end): 1 - r.num_kept / 24
            for r in drawn("tread", index=i, num_steps=100, **options)
        }
        for i in (0, 79)
    )
    assert early == {(1, 3): 0.5, (3, 5): 0.75, (5, 8): 0.5, (8, 9): 0.25}
    assert late == {(1, 3): 0.25, (3, 5): 0.75, (5, 8): 0.125}  # a rate of 0 is no route
    assert drawn("tread", index=80, num_steps=100, **options) == ()


def test_many_steps_cost_no_time():
    method = create("routing", "tread", selection_rate=["linear", 0.5, 0.25])
    stages = list(method.variants(stack(), 10**9))
    assert len(stages) == 5
    assert sum(len(steps) for steps, *_ in stages) == 10**9


@pytest.mark.parametrize(
    "options",
    [
        {"selection_rate": ["linear", 0.5, 1.0]},
        {"selection_rate": ["lineal", 0.5, 0.25]},
        {"selection_rate": ["steps", 0.5, [0.3]]},
        {"selection_rate": ["steps", 0.5, [0.5, 0.5], [0.4, 0.3]]},
        {"selection_rate": ["steps", 0.5, [0.9, 0.5]], "dense_tail": 0.2},
        {"selection_rate": ["steps", 0.5, [0.1, 0.5]], "warm_start": 0.1},
        {"routes": [{"start": 1, "end": 3, "probability": 0.5}]},
        {"warm_start": 0.5, "dense_tail": 0.5},
    ],
)
def test_rates_that_are_none_are_refused(options):
    with pytest.raises(ValueError, match=r"routing\."):
        create("routing", "tread", **options)


@pytest.mark.parametrize("step", [-1, 100])
def test_a_step_outside_the_run(step):
    with pytest.raises(ValueError, match=f"step={step} .* 100"):
        drawn("tread", index=step, num_steps=100)
