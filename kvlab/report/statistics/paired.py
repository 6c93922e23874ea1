"""Paired differences, one a seed: the mean, its interval, its test, and what could be detected.

The seed is the unit of replication. Everything that shares a seed (settings of the other factors,
batches in their order, first weights) may move together, so it is averaged before anything is
tested, and the error comes only from how the seeds' means differ. That is the one-sample t-test:
it holds whatever the settings' spreads are and however they depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kvlab.report.statistics.distributions import (
    chi_square_quantile,
    shifted_t_below,
    t_below,
    t_quantile,
)

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
        in_steps: as shares of a few items do; see `kvlab.trial.metrics.Metric.in_steps`.
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
    p = 2 * t_below(-abs(value) / error, df)
    return Estimate(value, "tested", error, df, value - half, value + half, p)


def smallest_detectable(error: float, df: int, tests: int = 1) -> float:
    """The true difference that would be called with `POWER`, given this standard error.

    Args:
        error: standard error of the difference.
        df: its degrees of freedom.
        tests: how many are corrected for; the strictest step of Holm's correction is assumed.
    """
    return error * _detectable(df, tests)


@lru_cache(maxsize=4096)
def _detectable(df: int, tests: int) -> float:
    """In standard errors; from the noncentral t distribution, by bisection."""
    threshold = t_quantile(1 - (1 - CONFIDENCE) / (2 * tests), df)
    low, high = 0.0, 2 * threshold + 20
    for _ in range(60):
        middle = (low + high) / 2
        power = 1 - shifted_t_below(threshold, df, middle)
        low, high = (middle, high) if power < POWER else (low, middle)
    return high


def spread_factors(df: int) -> tuple[float, float]:
    """Between how many times an estimated standard error the true one lies, with `CONFIDENCE`."""
    tail = (1 - CONFIDENCE) / 2
    return (
        (df / chi_square_quantile(1 - tail, df)) ** 0.5,
        (df / chi_square_quantile(tail, df)) ** 0.5,
    )
