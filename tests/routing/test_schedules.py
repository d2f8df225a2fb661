"""Schedules: which rate each step has, when nothing is routed, and what cannot work."""

import itertools
import math

import pytest
import torch

from tread_zoo.routing import build_routing, num_kept_tokens
from tread_zoo.seeding import make_generator

STEPS = 1000


def build(**options):
    return build_routing("tread", num_blocks=12, **options)


def rates(routing, num_steps=STEPS, seed=0):
    """Return the rate of the first route at every step, None where the step is dense."""
    plans = [routing.at(step, num_steps, seed).plans for step in range(num_steps)]
    return [each[0].selection_rate if each else None for each in plans]


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize(("first", "last"), [(0.75, 0.25), (0.1, 0.7)])
@pytest.mark.parametrize(("warm", "tail"), [(0.0, 0.0), (0.1, 0.2)])
def test_linear_and_cosine_follow_their_curve_by_small_stairs(name, first, last, warm, tail):
    routing = build(
        selection_rate=first, schedule=name, final_rate=last, warm_start=warm, dense_tail=tail
    )
    found = rates(routing)
    begin, end = round(warm * STEPS), STEPS - round(tail * STEPS)
    assert found[:begin] == [None] * begin
    assert found[end:] == [None] * (STEPS - end)
    routed = found[begin:end]
    assert (routed[0], routed[-1]) == (first, last)
    levels = sorted(set(routed))
    height = max(b - a for a, b in itertools.pairwise(levels))
    assert height <= 1 / 16 + 1e-9
    assert len(levels) <= 17
    for step, rate in enumerate(routed):
        part = step / (end - begin - 1)
        part = part if name == "linear" else (1 - math.cos(math.pi * part)) / 2
        assert abs(rate - first - (last - first) * part) <= height / 2 + 1e-9, step


def test_steps_hold_each_rate_from_its_fraction_on():
    routing = build(
        selection_rate=0.75, schedule="steps", rate_steps=[[0.3, 0.5], [0.6, 0.0], [0.8, 0.25]]
    )
    found = rates(routing, 10)
    assert found == [0.75] * 3 + [0.5] * 3 + [None] * 2 + [0.25] * 2


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_a_short_run_ends_at_the_final_rate(num_steps):
    found = rates(build(selection_rate=0.75, schedule="linear", final_rate=0.25), num_steps)
    assert found[-1] == 0.25
    assert found == sorted(found, reverse=True)


def test_probability_is_decided_by_seed_and_step_alone():
    routing = build(probability=0.3)
    found = rates(routing)
    assert found == rates(routing)
    assert found != rates(routing, seed=1)
    share = sum(rate is not None for rate in found) / STEPS
    assert share == pytest.approx(0.3, abs=0.06)  # four standard deviations
    assert routing.at(17, STEPS, 0).plans == routing.at(17, 50, 0).plans


def test_routes_have_schedules_of_their_own():
    routing = build(
        selection_rate=0.5,
        schedule="linear",
        final_rate=0.25,
        dense_tail=0.2,
        routes=[
            {"start": 1, "end": 3},
            {"start": 3, "end": 5, "schedule": "constant", "selection_rate": 0.75},
            {"start": 5, "end": 8, "schedule": "steps", "rate_steps": [[0.5, 0.125]]},
            {"start": 8, "end": 9, "schedule": "cosine", "selection_rate": 0.25, "final_rate": 0.0},
        ],
    )
    early, late = (
        {(p.start, p.end): p.selection_rate for p in routing.at(step, 100, 0).plans}
        for step in (0, 79)
    )
    assert early == {(1, 3): 0.5, (3, 5): 0.75, (5, 8): 0.5, (8, 9): 0.25}
    assert late == {(1, 3): 0.25, (3, 5): 0.75, (5, 8): 0.125}  # a rate of 0 is no route
    assert not routing.at(80, 100, 0).plans


def test_the_routing_of_a_step_is_plain_and_draws_as_plain_routing_does():
    routing = build(selection_rate=0.75, schedule="linear", final_rate=0.25, selector="blocks")
    at = routing.at(40, 100, 0)
    assert not at.is_scheduled
    (plan,) = at.plans
    plain = build(selection_rate=plan.selection_rate, selector="blocks")
    (one,), (other,) = (r.draw(3, (4, 4), make_generator("test")) for r in (at, plain))
    assert torch.equal(one.ids, other.ids)
    assert one.num_kept == num_kept_tokens(16, plan.selection_rate)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"warm_start": 0.13, "dense_tail": 0.2, "probability": 0.5},
        {"selection_rate": 0.7, "schedule": "cosine", "final_rate": 0.0, "dense_tail": 0.3},
        {"schedule": "steps", "rate_steps": [[0.2, 0.25], [0.7, 0.5]], "warm_start": 0.1},
        {
            "routes": [
                {"start": 1, "end": 3, "schedule": "linear", "final_rate": 0.75},
                {"start": 3, "end": 5, "schedule": "steps", "rate_steps": [[0.5, 0.0]]},
            ]
        },
    ],
)
def test_stages_are_the_steps_one_by_one(options):
    routing = build(**options)
    certain = build(**{**options, "probability": 1.0})
    next_step = 0
    for steps, used in routing.stages(97):
        assert steps.start == next_step
        next_step = steps.stop
        for step in steps:
            expected = [(p.start, p.selection_rate) for p in certain.at(step, 97, 0).plans]
            assert [(p.start, p.selection_rate) for p in used.plans] == expected
    assert next_step == 97


def test_many_steps_cost_no_time():
    stages = build(schedule="linear", final_rate=0.25).stages(10**9)
    assert len(stages) == 5
    assert sum(len(steps) for steps, _ in stages) == 10**9


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "linear"},
        {"final_rate": 0.25},
        {"rate_steps": [[0.5, 0.5]]},
        {"schedule": "steps"},
        {"schedule": "steps", "rate_steps": [[0.5, 0.5], [0.4, 0.3]]},
        {"schedule": "steps", "rate_steps": [[0.9, 0.5]], "dense_tail": 0.2},
        {"schedule": "steps", "rate_steps": [[0.1, 0.5]], "warm_start": 0.1},
        {"routes": [{"start": 1, "end": 3, "probability": 0.5}]},
        {"routes": [{"start": 1, "end": 3, "schedule": "linear"}]},
    ],
)
def test_fields_that_do_not_go_together_are_refused(options):
    with pytest.raises(ValueError, match=r"rate_|schedule|probability"):
        build(**options)


@pytest.mark.parametrize("step", [-1, 100])
def test_a_step_outside_the_run(step):
    with pytest.raises(ValueError, match=f"step={step} .* 100"):
        build(warm_start=0.1).at(step, 100, 0)
