"""The mean of several groups' paired differences, with groups as fixed conditions.

Each group is one condition (a setting of the other factors) in which the same difference was
seen at several seeds. The estimate is the mean of the groups' means. Its error comes only from
how a group's differences vary between seeds: that conditions differ from each other is a
finding (an interaction), not noise. Variances are not assumed equal. One group is the paired
t-test. With several the error is Welch's, and the degrees of freedom are Satterthwaite's with
their moments estimated without bias (von Davier 2025): the usual plug-in counts far too few when
a group has two seeds, so its intervals cover 98% instead of 95%.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kvlab.report.statistics.distributions import shifted_t_below, t_below, t_quantile

CONFIDENCE = 0.95
POWER = 0.8

Kind = Literal["tested", "one seed", "exact", "identical"]


@dataclass(frozen=True)
class Estimate:
    """A mean difference.

    ``kind``: ``tested`` has an interval and a p-value; ``one seed`` has no repeats to take an
    error from; ``exact`` is the same difference at every seed; ``identical`` is no difference.
    """

    value: float
    kind: Kind
    error: float = 0.0
    df: float = 0.0
    low: float = 0.0
    high: float = 0.0
    p: float = 1.0


def estimate(groups: Sequence[Sequence[float]], scale: float = 1.0) -> Estimate:
    """Mean over groups of the mean over seeds, with its t interval and two-sided p-value.

    Args:
        groups: differences at the seeds, a sequence a condition; none empty.
        scale: size of the numbers that were subtracted, so that rounding is not taken for noise.
    """
    means = [sum(group) / len(group) for group in groups]
    value = sum(means) / len(means)
    rounding = 1e-12 * max(scale, 1e-300)
    if all(abs(number) <= rounding for group in groups for number in group):
        return Estimate(0.0, "identical", low=0.0, high=0.0)
    variances, freedoms, ssq = _variances(groups, means)
    if not any(freedoms):
        return Estimate(value, "one seed", low=value, high=value)
    if ssq <= rounding**2 * sum(freedoms):
        return Estimate(value, "exact", low=value, high=value, p=0.0)
    pooled = ssq / sum(freedoms)  # lent to conditions that were seen at one seed only
    parts = [
        (variance if freedom else pooled) / len(group) / len(groups) ** 2
        for variance, freedom, group in zip(variances, freedoms, groups, strict=True)
    ]
    error = sum(parts) ** 0.5
    df = _freedom(parts, freedoms)
    half, p = _interval(value, error, df)
    return Estimate(value, "tested", error, df, value - half, value + half, p)


def _freedom(parts: Sequence[float], freedoms: Sequence[int]) -> float:
    """Degrees of freedom of a sum of variances, each with its own; those without count nothing.

    Satterthwaite's are (sum of v)^2 / sum of v^2 / f at the true variances v. The square of an
    estimate with f degrees of freedom is (f + 2) / f times too large on average; put right in
    both sums, that is (sum of v)^2 / (sum of v^2 / (f + 2)) - 2 (von Davier 2025).
    """
    known = [(part, f) for part, f in zip(parts, freedoms, strict=True) if f]
    total = sum(part for part, _ in known)
    found = total**2 / sum(part * part / (f + 2) for part, f in known) - 2
    return min(max(found, min(f for _, f in known)), float(sum(freedoms)))


def _variances(
    groups: Sequence[Sequence[float]], means: Sequence[float]
) -> tuple[list[float], list[int], float]:
    """Of each group its variance and degrees of freedom; and the sum of all squares."""
    squares = [
        sum((x - mean) ** 2 for x in group) for group, mean in zip(groups, means, strict=True)
    ]
    freedoms = [len(group) - 1 for group in groups]
    variances = [s / f if f else 0.0 for s, f in zip(squares, freedoms, strict=True)]
    return variances, freedoms, sum(squares)


def _interval(value: float, error: float, df: float) -> tuple[float, float]:
    """Half the width of the confidence interval, and the two-sided p-value."""
    half = t_quantile(0.5 + CONFIDENCE / 2, df) * error
    return half, 2 * t_below(-abs(value) / error, df)


def smallest_detectable(error: float, df: float, tests: int = 1) -> float:
    """The true difference that would be called with `POWER`, given this standard error.

    Args:
        error: standard error of the difference.
        df: its degrees of freedom.
        tests: how many are corrected for; the strictest step of Holm's correction is assumed.
    """
    return error * _detectable(round(df, 3), tests)


@lru_cache(maxsize=4096)
def _detectable(df: float, tests: int) -> float:
    """In standard errors; from the noncentral t distribution, by bisection."""
    threshold = t_quantile(1 - (1 - CONFIDENCE) / (2 * tests), df)
    low, high = 0.0, 2 * threshold + 20
    for _ in range(60):
        middle = (low + high) / 2
        power = 1 - shifted_t_below(threshold, df, middle)
        low, high = (middle, high) if power < POWER else (low, middle)
    return high
