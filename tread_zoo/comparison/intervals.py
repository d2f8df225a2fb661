"""Verdicts on differences: Student's t interval over training seeds, and a word for the result.

    mean ± t s / sqrt(n)        t of n-1 degrees of freedom, two-sided 95 %; n = 3 has t = 4.3

There are n values, one per training seed, and s is their standard deviation. Average repeated
scores of one seed first: a single pair of trainings settles nothing, however often it is scored.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
from scipy.special import stdtrit

LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean of n values and its interval `mean` ± `half`, which is infinite for n < 2."""

    mean: float
    half: float
    n: int

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.mean + self.half

    def in_brackets(self, *, signed: bool = False) -> str:
        """Return as text the mean and, if n > 1, the ends of the interval in brackets. `signed`
        puts + before positive numbers."""
        form = "+.3g" if signed else ".4g"
        ends = f" [{self.low:{form}}, {self.high:{form}}]" if self.n > 1 else ""
        return f"{self.mean:{form}}{ends}"

    def verdict(self, better: str) -> str:
        """Return the verdict on a difference: "not settled" if the interval contains 0, else
        "ahead" or "behind". `better` says whether `lower` or `higher` values are better."""
        if self.low <= 0 <= self.high:
            return "not settled"
        return "ahead" if (self.mean > 0) == (better == "higher") else "behind"


@dataclass(frozen=True)
class Ratio:
    """The ratio of two scores, such as the score with routing to that of the same backbone without.
    `log` is the logarithm of the ratio, with its interval. `dissent` is "" or, if a second metric
    leads to another verdict than this ratio, that verdict and the metric's name."""

    log: Interval
    dissent: str = ""

    @property
    def ratio(self) -> float:
        """The ratio, a geometric mean over seeds."""
        return math.exp(self.log.mean)

    def in_brackets(self) -> str:
        """Return the ratio, and the ends of its interval if there are several seeds."""
        if self.log.n < 2:
            return f"{self.ratio:.2f}"
        return f"{self.ratio:.2f} ({math.exp(self.log.low):.2f} to {math.exp(self.log.high):.2f})"


def interval(values: Sequence[float]) -> Interval:
    """Return the t-interval of the mean of one or more values."""
    n, series = len(values), pd.Series(values, dtype=float)
    t = stdtrit(n - 1, (1 + LEVEL) / 2) if n > 1 else math.nan
    return Interval(float(series.mean()), float(t * series.sem()) if n > 1 else math.inf, n)


def log_ratio(first: pd.Series, second: pd.Series, *, paired: bool) -> Interval:
    """Return the logarithm of the ratio of two positive scores, first over second, with its
    interval. exp of the interval's ends bounds the ratio itself.

    Args:
        first, second: scores indexed by training seed.
        paired: take the difference of logarithms for each seed. This suits networks that start from
            equal weights, as networks of one depth do. Otherwise Welch's interval is returned.
    """
    logs = [series.dropna().map(math.log) for series in (first, second)]
    if paired:
        return interval((logs[0] - logs[1]).dropna().tolist())
    mean, n = float(logs[0].mean() - logs[1].mean()), min(map(len, logs))
    if n < 2:
        return Interval(mean, math.inf, n)
    from scipy import stats  # it takes most of a second

    test = stats.ttest_ind(*logs, equal_var=False)
    low, high = test.confidence_interval(LEVEL)
    return Interval(mean, float(high - low) / 2, n)
