"""Intervals are scipy's, and a verdict is right as often as it says: planted effects and nulls."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tread_zoo.comparison.findings import spent_until
from tread_zoo.comparison.intervals import differences, interval, log_ratio, meets


@pytest.mark.parametrize("n", [2, 3, 4, 20])
def test_an_interval_is_that_of_scipy(n):
    values = np.random.default_rng(n).normal(3, 2, n)
    got = interval(values)
    low, high = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values))
    assert (got.low, got.high, got.n) == (pytest.approx(low), pytest.approx(high), n)


@pytest.mark.parametrize(
    ("values", "better", "verdict"),
    [
        ([-0.1, -0.11, -0.12], "lower", "ahead"),
        ([-0.1, -0.11, -0.12], "higher", "behind"),
        ([0.1, 0.11, 0.12], "higher", "ahead"),
        ([-0.1, -0.2], "lower", "not settled"),  # both below 0: a coin does so every second time
        ([-0.1, 0.2, -0.3], "lower", "not settled"),
        ([0.0, 0.0], "lower", "not settled"),
        ([-5.0], "lower", "not settled"),
    ],
)
def test_a_verdict_is_what_the_interval_leaves_out(values, better, verdict):
    assert interval(values).verdict(better) == verdict


def planted(effect, seeds=3, draws=4, trials=1000):
    """Return how often each verdict is given of two arms whose trainings spread by 0.1."""
    generator = np.random.default_rng(0)
    index = pd.MultiIndex.from_product([range(seeds), range(draws)])
    verdicts = []
    for _ in range(trials):
        first, second = (
            pd.Series(
                np.repeat(generator.normal(mean, 0.1, seeds), draws)
                + generator.normal(0, 0.05, seeds * draws),
                index,
            )
            for mean in (effect, 0)
        )
        verdicts.append(interval(differences(first, second)).verdict("lower"))
    return pd.Series(verdicts).value_counts(normalize=True)


def test_a_planted_null_is_settled_in_one_of_twenty_and_a_planted_effect_is_found():
    """Draws of noise within a training are no further seeds: the error stays at 5 %."""
    assert planted(0)["not settled"] == pytest.approx(0.95, abs=0.02)
    verdicts = planted(-1.0)
    assert verdicts["ahead"] > 0.9
    assert "behind" not in verdicts


def test_differences_are_of_equal_draws_and_seeds():
    first = pd.Series({(0, 1): 1.0, (0, 2): 2.0, (1, 1): 5.0})
    second = pd.Series({(0, 1): 0.5, (0, 2): 1.0, (0, 3): 9.0, (2, 1): 7.0})
    assert differences(first, second).to_dict() == {0: 0.75}


def scores(*runs):
    rows = [
        {"folder": f"run{i}", "step": 100 * k, "flops": 1e6 * k, "seconds": k, "value": value}
        for i, run in enumerate(runs)
        for k, value in enumerate(run, 1)
    ]
    return pd.DataFrame(rows)


def test_a_lucky_single_run_meets_no_goal():
    lucky = [0.5, 0.99, 0.96, 0.97]
    assert spent_until(scores(lucky), 0.97, "higher") is None
    assert spent_until(scores(lucky, lucky), 0.97, "higher") is None
    plain = [[0.5, 0.95, 0.96, 0.969], [0.5, 0.94, 0.95, 0.968]]
    assert spent_until(scores(lucky, *plain), 0.97, "higher") is None


def test_three_runs_meet_a_goal_where_their_mean_does_beyond_doubt():
    runs = [0.9, 0.972, 0.98, 0.98], [0.9, 0.968, 0.981, 0.98], [0.9, 0.974, 0.979, 0.979]
    table = scores(*runs)  # at 200 above, not surely
    assert spent_until(table, 0.97, "higher").step.unique() == [300]
    assert spent_until(table[table.step < 400], 0.97, "higher") is None, "not confirmed"
    only = table[table.step == 300]
    assert spent_until(only, 0.97, "higher").step.unique() == [300], "a single look"
    lower = spent_until(table.assign(value=-table.value), -0.97, "lower")
    assert lower.step.unique() == [300]


@pytest.mark.parametrize("lasting", [0, 0.5, 0.9])
def test_ten_looks_let_a_planted_null_in_about_as_seldom_as_one(lasting):
    """Runs whose mean stays at the goal, where a single look errs most. `lasting` is the part of
    their variance that a run keeps from score to score."""
    generator, entered = np.random.default_rng(0), []
    for _ in range(200):
        own = generator.normal(0, lasting**0.5, (3, 1))
        runs = own + generator.normal(0, (1 - lasting) ** 0.5, (3, 10))
        entered.append(spent_until(scores(*runs), 0.0, "higher") is not None)
    assert np.mean(entered) < 0.1


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_the_test_of_a_goal_is_one_sided_at_five_per_cent(better):
    sign = -1 if better == "lower" else 1
    values = np.array([1.0, 1.3, 1.1, 1.25])
    side = "greater" if better == "higher" else "less"
    for goal in np.linspace(0.8, 1.2, 41):
        p = stats.ttest_1samp(sign * values, sign * goal, alternative=side).pvalue
        assert meets(sign * values, sign * goal, better) == (p <= 0.05)


@pytest.mark.parametrize("paired", [True, False])
def test_the_interval_of_a_ratio_is_scipy_s(paired):
    """Of distances of two arms: 5 and 4 seeds, 3 of them common."""
    first = pd.Series([1.0, 1.2, 0.9, 1.1, 1.3], index=[0, 1, 2, 3, 4])
    second = pd.Series([0.8, 1.0, 0.7, 0.9], index=[2, 3, 4, 5])
    found = log_ratio(first, second, paired=paired)
    if paired:
        common = np.log([0.9, 1.1, 1.3]) - np.log([0.8, 1.0, 0.7])
        ends = stats.ttest_1samp(common, 0).confidence_interval(0.95)
    else:
        test = stats.ttest_ind(np.log(first), np.log(second), equal_var=False)
        ends = test.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((ends.low, ends.high))


def test_a_planted_ratio_is_found_and_none_where_there_is_none():
    draws = np.random.default_rng(0)
    found = {1.0: 0, 0.8: 0}
    for ratio in found:
        for _ in range(200):
            first, second = np.exp(0.075 * draws.standard_normal((2, 6)))
            interval = log_ratio(pd.Series(ratio * first), pd.Series(second), paired=False)
            found[ratio] += interval.verdict("lower") != "not settled"
    assert found[1.0] < 25  # 5 % of 200, and four standard deviations
    assert found[0.8] > 190
