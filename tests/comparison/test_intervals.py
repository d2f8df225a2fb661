"""Intervals equal scipy's, and verdicts are right as often as stated: planted effects and nulls."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from tread_zoo.comparison.intervals import interval, log_ratio


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


def planted(effect, seeds=3, trials=1000):
    """Return how often each verdict is given for two arms whose scores have standard deviation
    0.1."""
    generator = np.random.default_rng(0)
    scores = generator.normal(0, 0.1, (2, trials, seeds))
    verdicts = [interval(each).verdict("lower") for each in scores[0] - scores[1] + effect]
    return pd.Series(verdicts).value_counts(normalize=True)


@pytest.mark.slow
def test_a_planted_null_is_settled_in_one_of_twenty_and_a_planted_effect_is_found():
    assert planted(0)["not settled"] == pytest.approx(0.95, abs=0.02)
    verdicts = planted(-1.0)
    assert verdicts["ahead"] > 0.9
    assert "behind" not in verdicts


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


@pytest.mark.slow
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
