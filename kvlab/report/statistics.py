"""Statistics of paired comparisons. Pure functions of numbers; scipy does the distributions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

# Paired differences, one a seed: the mean, its interval, its test, and what could be detected.
#
# The seed is the unit of replication. Everything that shares a seed (settings of the other factors,
# batches in their order, first weights) may move together, so it is averaged before anything is
# tested, and the error comes only from how the seeds' means differ. That is the one-sample t-test:
# it holds whatever the settings' spreads are and however they depend on each other.


CONFIDENCE = 0.95
POWER = 0.8

Kind = Literal["tested", "one seed", "unvaried", "exact", "identical"]

UNTESTED: dict[str, str] = {
    "one seed": "one seed: not tested",
    "unvaried": "same at every seed: not tested",
    "identical": "identical",
}
"""What is said of the kinds that are neither tested nor exact."""


@dataclass(frozen=True)
class Estimate:
    """A mean difference.

    ``kind``: ``tested`` has an interval and a p-value; ``one seed`` has no repeats to take an
    error from; ``exact`` is the same difference at every seed; ``unvaried`` too, but of a metric
    that moves in steps, where that is chance; ``identical`` is no difference.
    """

    value: float
    kind: Kind
    error: float = 0.0
    df: int = 0
    low: float = 0.0
    high: float = 0.0
    p: float = 1.0


def estimate(
    differences: Sequence[float], scale: float = 1.0, *, in_steps: bool = False
) -> Estimate:
    """The mean over seeds, with its t interval and two-sided p-value.

    Args:
        differences: one a seed; at least one.
        scale: size of the numbers that were subtracted, so that rounding is not taken for noise.
        in_steps: as shares of a few items do; see `kvlab.store.metrics.Metric.in_steps`.
    """
    count = len(differences)
    value = sum(differences) / count
    rounding = 1e-12 * max(scale, 1e-300)
    if all(abs(number) <= rounding for number in differences):
        return Estimate(0.0, "identical")
    if count == 1:
        return Estimate(value, "one seed", low=value, high=value)
    variance = sum((number - value) ** 2 for number in differences) / (count - 1)
    if variance <= rounding**2:
        if in_steps:
            return Estimate(value, "unvaried", low=value, high=value)
        return Estimate(value, "exact", low=value, high=value, p=0.0)
    error, df = (variance / count) ** 0.5, count - 1
    half = t_quantile(0.5 + CONFIDENCE / 2, df) * error
    p = 2 * t_cdf(-abs(value) / error, df)
    return Estimate(value, "tested", error, df, value - half, value + half, p)


def smallest_detectable(error: float, df: int, tests: int = 1) -> float:
    """The true difference that would be called with `POWER`, given this standard error.

    Args:
        error: standard error of the difference.
        df: its degrees of freedom.
        tests: how many are corrected for; the strictest step of Holm's correction is assumed.
    """
    return error * _detectable_in_errors(df, tests)


@lru_cache(maxsize=4096)
def _detectable_in_errors(df: int, tests: int) -> float:
    """In standard errors; from the noncentral t distribution, by bisection."""
    threshold = t_quantile(1 - (1 - CONFIDENCE) / (2 * tests), df)
    low, high = 0.0, 2 * threshold + 20
    for _ in range(60):
        middle = (low + high) / 2
        power = 1 - noncentral_t_cdf(threshold, df, middle)
        low, high = (middle, high) if power < POWER else (low, middle)
    return high


def spread_factors(df: int) -> tuple[float, float]:
    """Between how many times an estimated standard error the true one lies, with `CONFIDENCE`."""
    tail = (1 - CONFIDENCE) / 2
    return (
        (df / chi_square_quantile(1 - tail, df)) ** 0.5,
        (df / chi_square_quantile(tail, df)) ** 0.5,
    )


# Holm's step-down correction for several tests (Holm 1979).


def holm_correction(p_values: Sequence[float]) -> list[float]:
    """Corrected p-values, in the order given: at level a, at most a chance of any false call."""
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


# Two systems on the same items: McNemar's test, and its form for items seen at several seeds.
#
# At one seed the items that only one of the two gets right decide: McNemar's exact test. At
# several seeds one item's outcomes belong together, so the item is the unit: its difference is
# averaged over seeds, and the test is that of Durkalski and others (2003), which at one seed is
# McNemar's chi-square. The error says how a fresh draw of *items* would move the difference; it
# does not know how fresh *seeds* would.


NORMAL_QUANTILE_975 = 1.959963984540054


@dataclass(frozen=True)
class ItemComparison:
    """B against A on shared items.

    Attributes:
        difference: share that B gets right minus share that A does.
        error: standard error of it over items.
        gained, lost: times that only B, only A was right, over all seeds.
        p: two-sided.
    """

    items: int
    seeds: int
    difference: float
    error: float
    gained: int
    lost: int
    p: float

    @property
    def interval(self) -> tuple[float, float]:
        half = NORMAL_QUANTILE_975 * self.error
        return self.difference - half, self.difference + half


def compare_items(
    pairs: Sequence[tuple[Sequence[bool] | bytes, Sequence[bool] | bytes]],
) -> ItemComparison:
    """Compares outcomes of the same items, one ``(A, B)`` a seed, all in the same item order."""
    import numpy as np

    a = np.array([np.frombuffer(bytes(left), np.uint8) for left, _ in pairs], dtype=np.int64)
    b = np.array([np.frombuffer(bytes(right), np.uint8) for _, right in pairs], dtype=np.int64)
    seeds, items = a.shape
    gained, lost = int(((b == 1) & (a == 0)).sum()), int(((b == 0) & (a == 1)).sum())
    totals = (b - a).sum(axis=0)
    mean = float(totals.mean()) / seeds
    spread = float(totals.std(ddof=1)) / seeds if items > 1 else 0.0
    p = mcnemar(gained, lost) if seeds == 1 else _clustered_p_value(totals.tolist())
    return ItemComparison(items, seeds, mean, spread / items**0.5, gained, lost, p)


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided p-value: a fair coin for every item that only one side gets right."""
    total = gained + lost
    return min(1.0, 2 * fair_coin_cdf(min(gained, lost), total)) if total else 1.0


def _clustered_p_value(totals: Sequence[int]) -> float:
    squares = sum(total * total for total in totals)
    return normal_two_sided_p(sum(totals) / squares**0.5) if squares else 1.0


# The distribution functions that the report needs, from scipy, which is imported at first use.


def t_cdf(value: float, df: float) -> float:
    """Probability that Student's t is below ``value``."""
    from scipy.special import stdtr  # type: ignore[import-untyped]

    return float(stdtr(df, value))


def t_quantile(share: float, df: float) -> float:
    """The value that Student's t is below with probability ``share``."""
    from scipy.special import stdtrit

    return float(stdtrit(df, share))


def noncentral_t_cdf(value: float, df: float, shift: float) -> float:
    """Probability that the noncentral t with this noncentrality is below ``value``."""
    from scipy.special import nctdtr

    return float(nctdtr(df, shift, value))


def chi_square_quantile(share: float, df: float) -> float:
    """The value that chi-square is below with probability ``share``."""
    from scipy.special import chdtri

    return float(chdtri(df, 1 - share))


def fair_coin_cdf(heads: int, tosses: int) -> float:
    """Probability of at most ``heads`` in ``tosses`` of a fair coin."""
    from scipy.special import bdtr

    return float(bdtr(heads, tosses, 0.5))


def normal_two_sided_p(value: float) -> float:
    """Probability that a standard normal is farther from zero than ``value``."""
    from scipy.special import erfc

    return float(erfc(abs(value) / 2**0.5))
