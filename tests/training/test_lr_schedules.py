"""Learning-rate schedules against their formulas."""

import math

import pytest

from tread_zoo.registry import create

NUM_STEPS = 200
AFTER = {  # of the progress after a warm-up of 40 steps
    "constant": lambda p: 1.0,
    "linear": lambda p: 1 - p,
    "cosine": lambda p: (1 + math.cos(math.pi * p)) / 2,
    "wsd": lambda p: min(1.0, (1 - p) * 160 / 50),  # decay=0.25: the last 50 of 200 steps
}
OPTIONS = {"wsd": {"decay": 0.25}}


def factors(name, num_steps=NUM_STEPS, **options):
    schedule = create("lr_schedule", name, **OPTIONS.get(name, {}), **options)
    return [schedule(step, num_steps) for step in range(num_steps)]


@pytest.mark.parametrize("name", AFTER)
def test_a_schedule_warms_up_and_then_follows_its_formula(name):
    expected = [(step + 1) / 40 for step in range(40)]
    expected += [AFTER[name]((step - 40) / 160) for step in range(40, NUM_STEPS)]
    assert factors(name, warmup_steps=40) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", AFTER)
def test_every_step_of_a_schedule_moves_and_none_passes_the_peak(name):
    for num_steps, warmup_steps in ((NUM_STEPS, 0), (10, 50), (1, 0), (1, 1)):
        run = factors(name, num_steps, warmup_steps=warmup_steps)
        assert all(0 < factor <= 1 for factor in run)
        assert max(run) == 1 or warmup_steps > num_steps
