"""Statistics of paired comparisons: differences over seeds, McNemar's test, sign flips.

The seed is the unit of replication. Everything that shares a seed (the settings of the other
factors, the order of batches, the initial weights) may move together, so it is averaged before
testing, and the error comes only from the spread of the seeds' means. The test is the one-sample
t-test: it holds whatever the spreads of the settings are and however they depend on each other.

HellaSwag outcomes are also compared item by item. At one seed the items that only one of two
cells gets right decide (McNemar's exact test). At several seeds the outcomes of one item are
correlated, so the item is the unit: the sign of its net difference over seeds is flipped, and all
patterns of signs are counted, which at one seed is McNemar's test. It describes another draw of
items, not another draw of seeds.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvlab.analysis.standard_errors import StandardError

CONFIDENCE = 0.95
ALPHA = 0.05
"""Significance level, after Holm's correction."""

POWER = 0.8

EstimateKind = Literal["tested", "one seed", "unvaried", "exact", "identical"]


def sum_squares(values: Iterable[float], center: float = 0.0) -> float:
    """Return the sum of squared differences from ``center``, to the bit the same on every machine.

    Products, square roots and `math.fsum` are rounded correctly everywhere. Powers differ in their
    last digit between processors, and `sum` between versions of Python; so would the tables of a
    report.
    """
    return math.fsum((value - center) * (value - center) for value in values)


@dataclass(frozen=True)
class Estimate:
    """A mean difference over seeds.

    Attributes:
        kind: ``tested`` has an interval and a p-value. ``one seed`` has no replicates. ``exact``
            is the same difference at every seed. ``unvaried`` is the same, but of a metric that
            moves in steps, where equal differences occur by chance. ``identical`` is zero.
        df: Degrees of freedom; of a test of its own, the number of seeds minus one.
        p: Two-sided p-value, uncorrected.
    """

    value: float
    kind: EstimateKind
    standard_error: float = 0.0
    df: float = 0
    low: float = 0.0
    high: float = 0.0
    p: float = 1.0

    @property
    def error(self) -> StandardError | None:
        """Its own standard error; None if it is not tested."""
        return StandardError(self.standard_error, self.df) if self.kind == "tested" else None

    @property
    def is_found(self) -> bool:
        """Whether a test has shown that the difference is not zero."""
        return self.kind == "tested" and not self.low < 0 < self.high


def estimate(
    differences: Sequence[float],
    scale: float = 1.0,
    *,
    in_steps: bool = False,
    least_error: float = 0.0,
) -> Estimate:
    """Estimate a mean difference, with its t interval and two-sided p-value.

    Args:
        differences: One difference per seed; at least one.
        scale: Magnitude of the numbers that were subtracted. Differences below its rounding
            error count as equal.
        in_steps: Whether the metric is a share of items; see
            `kvlab.store.metrics.Metric.is_share`.
        least_error: The standard error is at least this, see `share_variance`.
    """
    count = len(differences)
    value = math.fsum(differences) / count
    rounding = 1e-12 * max(scale, 1e-300)
    has_floor = least_error > 0 and count > 1
    if all(abs(number) <= rounding for number in differences) and not has_floor:
        return Estimate(0.0, "identical")
    if count == 1:
        return Estimate(value, "one seed", low=value, high=value)
    variance = sum_squares(differences, value) / (count - 1)
    if variance <= rounding**2 and not has_floor:
        if in_steps:
            return Estimate(value, "unvaried", low=value, high=value)
        return Estimate(value, "exact", low=value, high=value, p=0.0)
    return tested(value, max(math.sqrt(variance / count), least_error), count - 1)


def tested(value: float, standard_error: float, df: float) -> Estimate:
    """Return a difference with its t interval and its two-sided p-value."""
    half_width = t_quantile(0.5 + CONFIDENCE / 2, df) * standard_error
    p = 2 * t_cdf(-abs(value) / standard_error, df)
    return Estimate(value, "tested", standard_error, df, value - half_width, value + half_width, p)


def share_variance(share: float, items: float) -> float:
    """Return the variance of a share of items, as two right and two wrong ones more give it.

    Near 0 and 1 seeds agree by chance, and their spread says too little of the noise of a share;
    with four items more (Agresti and Coull 1998) it is never zero.
    """
    likely = (share * items + 2) / (items + 4)
    return likely * (1 - likely) / items


def smallest_detectable(standard_error: float, df: float, level: float) -> float:
    """Return the true difference that is found significant with probability `POWER`.

    Args:
        level: Two-sided level of its test.
    """
    return standard_error * _detectable_in_errors(df, level)


@lru_cache(maxsize=4096)
def _detectable_in_errors(df: float, alpha: float) -> float:
    """Solve the power of the noncentral t distribution by bisection, in standard errors."""
    from scipy.special import nctdtr  # type: ignore[import-untyped]

    threshold = t_quantile(1 - alpha / 2, df)
    low, high = 0.0, 2 * threshold + 20
    for _ in range(60):
        middle = (low + high) / 2
        power = 1 - float(nctdtr(df, middle, threshold))
        low, high = (middle, high) if power < POWER else (low, middle)
    return high


def spread_factors(df: float) -> tuple[float, float]:
    """Return the 95% interval of the true standard error, in multiples of the estimated one."""
    from scipy.special import chdtri

    tail = (1 - CONFIDENCE) / 2
    low, high = (math.sqrt(df / float(chdtri(df, one))) for one in (tail, 1 - tail))
    return low, high


@dataclass(frozen=True)
class ItemComparison:
    """Outcomes of system B against system A on the same items.

    Attributes:
        difference: Share that B gets right minus the share that A gets right.
        gained: Outcomes that only B gets right, over all seeds.
        lost: Outcomes that only A gets right, over all seeds.
        net_counts: ``(k, items for B, items for A)`` of the items of which one of both gets k more
            right than the other, over all seeds.
        p: Two-sided p-value, uncorrected.
    """

    items: int
    seeds: int
    difference: float
    gained: int
    lost: int
    net_counts: tuple[tuple[int, int, int], ...]
    p: float

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Return the interval of ``difference`` that inverts the test.

        Given how many items one of both gets more right, and by how many seeds, the smallest and
        the largest probability that such an item is B's are those which a tail of ``alpha / 2``
        allows (of Clopper and Pearson 1934 at one seed). So it contains 0 if and only if the test
        of 0 is not significant at ``alpha``.
        """
        total = sum(k * (b + a) for k, b, a in self.net_counts)
        if not total:
            return 0.0, 0.0
        most = total / (self.items * self.seeds)
        low = _solve_share(self.net_counts, alpha / 2)
        high = 1 - _solve_share([(k, a, b) for k, b, a in self.net_counts], alpha / 2)
        return most * (2 * low - 1), most * (2 * high - 1)


def compare_items(
    pairs: Sequence[tuple[Sequence[bool] | bytes, Sequence[bool] | bytes]],
) -> ItemComparison:
    """Compare outcomes of the same items.

    Args:
        pairs: One ``(outcomes of A, outcomes of B)`` per seed, all in the same item order.
    """
    a = np.array([np.frombuffer(bytes(left), np.uint8) for left, _ in pairs], dtype=np.int64)
    b = np.array([np.frombuffer(bytes(right), np.uint8) for _, right in pairs], dtype=np.int64)
    seeds, items = a.shape
    gained, lost = int(((b == 1) & (a == 0)).sum()), int(((b == 0) & (a == 1)).sum())
    net = (b - a).sum(axis=0)
    counts = tuple(
        (k, int((net == k).sum()), int((net == -k).sum()))
        for k in range(1, seeds + 1)
        if (np.abs(net) == k).any()
    )
    p = min(1.0, 2 * min(_net_tail(counts, 0.5), _net_tail([(k, y, x) for k, x, y in counts], 0.5)))
    return ItemComparison(items, seeds, float(net.mean()) / seeds, gained, lost, counts, p)


def _net_tail(net_counts: Sequence[tuple[int, int, int]], share: float) -> float:
    """Return P(sum >= observed) where every item is B's with probability ``share``.

    An item of magnitude k adds k if it is B's: the distributions of all magnitudes are convolved.
    """
    distribution, lowest = np.ones(1), 0
    observed = sum(k * b for k, b, _ in net_counts)
    for k, b, a in net_counts:
        first, masses = _binomial_masses(b + a, share)
        steps = np.zeros(k * (masses.size - 1) + 1)
        steps[::k] = masses
        distribution, lowest = np.convolve(distribution, steps), lowest + k * first
    return float(min(1.0, distribution[max(0, observed - lowest) :].sum()))


def _binomial_masses(count: int, share: float) -> "tuple[int, NDArray[np.float64]]":
    """Return the probabilities of consecutive numbers of heads, and the first of these numbers.

    Numbers more than ten standard deviations from the mean, and 50, are left out.
    """
    from scipy.special import gammaln, xlogy

    reach = 10 * math.sqrt(count * share * (1 - share)) + 50
    first = max(0, int(count * share - reach))
    heads = np.arange(first, min(count, int(count * share + reach)) + 1)
    ways = gammaln(count + 1) - gammaln(heads + 1) - gammaln(count - heads + 1)
    return first, np.exp(ways + xlogy(heads, share) + xlogy(count - heads, 1 - share))


def _solve_share(net_counts: Sequence[tuple[int, int, int]], tail: float) -> float:
    """Return the smallest share at which the observed sum is not yet in the upper tail."""
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    if not any(b for _, b, _ in net_counts):
        return 0.0
    return float(brentq(lambda share: _net_tail(net_counts, share) - tail, 0.0, 1.0, xtol=1e-10))


def sign_flip_test(differences: Iterable[int]) -> float:
    """Return the two-sided p-value of the sign-flip (randomization) test of a mean of zero.

    It assumes that each difference is as likely as its negative, no distribution (Fisher 1935). The
    statistic is the absolute sum.

    Args:
        differences: One whole number per independent unit, such as a seed.

    Returns:
        The share of all sign patterns whose absolute sum is at least the observed one. With n
        non-zero differences it is never below 2**(1 - n).
    """
    patterns, observed = Counter({0: 1}), 0
    for value in differences:
        flipped: Counter[int] = Counter()
        for total, count in patterns.items():
            flipped[total + value] += count
            flipped[total - value] += count
        patterns, observed = flipped, observed + value
    reached = sum(count for total, count in patterns.items() if abs(total) >= abs(observed))
    return reached / patterns.total()


# Distribution functions. scipy.special is imported at first use: it takes a noticeable time.


def t_cdf(value: float, df: float) -> float:
    """Return P(T <= value) of Student's t distribution."""
    from scipy.special import stdtr

    return float(stdtr(df, value))


def t_quantile(probability: float, df: float) -> float:
    """Return the quantile of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(df, probability))
