"""Standard errors and critical values of differences that are judged together.

Differences that are divided by one common standard error are judged by the studentized maximum
modulus (Hochberg 1974). It assumes no correlation between them: by Sidak's inequality any
correlation only lowers the error. The common variance is averaged over units, such as cells. Where
a level does well or badly at a seed in many cells at once, they say less about it than their number
promises, so its degrees of freedom are those of Box (1954) and Greenhouse and Geisser (1959).
Differences with errors of their own are judged by Bonferroni's correction.

Pooled standard errors say what all levels of a sweep tell together about the noise of training.
With three seeds a level's own paired differences hardly tell their spread, and its t-test finds
little. If every training has the same variance, the variance over seeds of each main effect,
divided by the squared length of its contrast, estimates that variance; the average over the main
effects knows it much better. That is a model, so it is never used to shrink an error: the standard
error is the larger of a level's own and the pooled one.

The degrees of freedom of the average are Satterthwaite's (1946). With K orthogonal main effects
over S seeds and equal variances they are K(S-1). Main effects that share cells, such as levels that
are all compared with one baseline cell, are correlated, and one cell that is far noisier than the
others makes all of them move together; either leaves fewer. So they are computed twice from the
contrasts' covariance, with equal variances and with the cells' own residual variances, and the
fewer are used. A level that was seen at fewer seeds than another gets fewer in proportion. Where a
level's own error is the larger, its degrees of freedom are the geometric mean of the pooled and its
own; at two seeds its own single one.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from kvlab.analysis.statistics import t_cdf, t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]


Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class StandardError:
    """The error that a difference is tested with.

    Attributes:
        value: The standard error, in the unit of the difference.
        df: Its degrees of freedom.
        is_pooled: Whether it is the pooled one, the larger of the two.
    """

    value: float
    df: float
    is_pooled: bool = False


def pool_errors(
    differences: Sequence[Mapping[int, float]],
    weights: Sequence[Mapping[Key, float]],
    values: Mapping[Key, Mapping[int, float]],
) -> list[StandardError]:
    """Return the larger of each contrast's own and the pooled standard error.

    Args:
        differences: Of each contrast, its value by seed; at least two seeds each, which may differ.
        weights: Of each contrast, the weight of every training in it; not all zero.
        values: Training -> value by seed, of all trainings that have a weight.
    """
    import numpy as np

    keys = list(dict.fromkeys(key for one in weights for key in one))
    matrix = np.array([[one.get(key, 0.0) for key in keys] for one in weights])
    lengths = (matrix**2).sum(axis=1)
    matrix /= np.sqrt(lengths)[:, None]
    counts = np.array([len(one) for one in differences], dtype=np.float64)
    variances = np.array([np.var(list(one.values()), ddof=1) for one in differences])
    pooled = float(((counts - 1) * variances / lengths).sum() / (counts - 1).sum())
    overlaps = _shared_freedom(differences)
    noise = _residual_variances([values[key] for key in keys])
    df = min(_satterthwaite_df(matrix, overlaps, one) for one in (np.ones(len(keys)), noise))
    own_errors, pooled_errors = np.sqrt(variances / counts), np.sqrt(pooled * lengths / counts)
    shares = (counts - 1) / (counts.max() - 1)
    return [
        _larger_error(*one, is_alone=len(differences) == 1)
        for one in zip(
            own_errors.tolist(),
            pooled_errors.tolist(),
            (counts - 1).tolist(),
            np.maximum(1.0, df * shares).tolist(),
            strict=True,
        )
    ]


def _larger_error(
    own: float, pooled: float, own_df: float, pooled_df: float, *, is_alone: bool
) -> StandardError:
    if pooled >= own:
        return StandardError(pooled, pooled_df, is_pooled=not is_alone)
    return StandardError(own, 1.0 if own_df == 1 else math.sqrt(pooled_df * own_df))


def _shared_freedom(differences: Sequence[Mapping[int, float]]) -> "Array":
    """Return the degrees of freedom that each two variances share; a variance's own with itself.

    The covariance of the variances of two samples with a and b members, o of them at common seeds,
    is 2 c**2 f / ((a-1) (b-1)) for a covariance c of the members and f = o - o/a - o/b + o**2/(ab).
    """
    import numpy as np

    seeds = sorted(set().union(*differences))
    present = np.array([[float(seed in one) for seed in seeds] for one in differences])
    shared, counts = present @ present.T, present.sum(axis=1)
    result: Array = (
        shared - shared / counts - shared / counts[:, None] + shared**2 / np.outer(counts, counts)
    )
    return result


def _satterthwaite_df(matrix: "Array", shared_freedom: "Array", noise: "Array") -> float:
    """Return the degrees of freedom of the average variance, for such variances of trainings."""
    covariance = (matrix * noise) @ matrix.T
    mean = float((shared_freedom.diagonal() * covariance.diagonal()).sum())
    return mean**2 / float((covariance**2 * shared_freedom).sum())


def _residual_variances(values: Sequence[Mapping[int, float]]) -> "Array":
    """Return the variance of each training over seeds, after what the seeds share.

    It fits training plus seed by alternating means. A training at one seed gets the average.
    """
    import numpy as np

    seeds = sorted(set().union(*values))
    table = np.array([[one.get(seed, np.nan) for seed in seeds] for one in values])
    is_there = ~np.isnan(table)
    for _ in range(1 if is_there.all() else 20):
        table = table - np.nanmean(table, axis=1, keepdims=True)
        table = table - np.nanmean(table, axis=0)
    counts = is_there.sum(axis=1)
    squares = np.where(is_there, table, 0.0) ** 2
    variances: Array = squares.sum(axis=1) / np.maximum(counts - 1, 1)
    average = float(variances[counts > 1].mean()) if np.any(counts > 1) else 0.0
    variances = np.where(counts > 1, variances, average)
    return variances if average > 0 else np.ones(len(values))


_MAX_DF = 1000.0
_DF_STEP = 0.05
"""Degrees of freedom are rounded down in steps of 5%, so that few quantiles are computed."""


@dataclass(frozen=True)
class PooledVariance:
    """The variance of one unit over seeds, averaged over units, and its degrees of freedom."""

    variance: float
    df: float


def pool_variance(residuals: "NDArray[np.float64]", df: float, df_of_unit: float) -> PooledVariance:
    """Average the variance over units.

    Args:
        residuals: (units, seeds) Residuals of a fit, 0 where a value is missing.
        df: Residual degrees of freedom of the fit, over all units.
        df_of_unit: The same of a single independent unit.

    Returns:
        The average, with the degrees of freedom of Greenhouse and Geisser: those of one unit times
        ``tr(C)**2 / tr(C @ C)`` of the units' covariance ``C``, at most ``df``.
    """
    import numpy as np

    squares = float((residuals**2).sum())
    if df < 1 or squares == 0.0:
        return PooledVariance(0.0, 1.0)
    products = residuals.T @ residuals  # its eigenvalues are those of C
    effective_units = squares**2 / float((products**2).sum())
    return PooledVariance(squares / df, float(np.clip(df_of_unit * effective_units, 1.0, df)))


def pool_errors_of_means(
    rows: Sequence[Mapping[int, float]], pools: Sequence[bool]
) -> list[StandardError]:
    """Return the standard error of every row's mean over seeds.

    Args:
        rows: Values by seed, of at least two seeds each, not all equal.
        pools: Whether a row takes part in the pooled variance; else it keeps its own.

    Returns:
        The larger of a row's own and the pooled standard error. Where a row's own is the larger, or
        it has fewer seeds than others, the degrees of freedom are the geometric mean of both.
    """
    import numpy as np

    seeds = sorted({seed for row in rows for seed in row})
    table = np.array([[row.get(seed, np.nan) for seed in seeds] for row in rows])
    table = table.reshape(len(rows), len(seeds))
    counts = np.sum(~np.isnan(table), axis=1)
    residuals = np.nan_to_num(table - np.nanmean(table, axis=1, keepdims=True))
    chosen = residuals[np.array(pools, dtype=bool)]
    df = float((counts[np.array(pools, dtype=bool)] - 1).sum())
    pooled = pool_variance(chosen, df, df / max(1, len(chosen)))
    errors = []
    for one, count, is_pooled in zip(residuals, counts.tolist(), pools, strict=True):
        own = float((one**2).sum()) / (count - 1)
        between = max(1.0, math.sqrt(pooled.df * (count - 1)))
        if not is_pooled:
            errors.append(StandardError(math.sqrt(own / count), count - 1))
        elif pooled.variance >= own:
            full = count == len(seeds)
            error = math.sqrt(pooled.variance / count)
            errors.append(StandardError(error, pooled.df if full else between, is_pooled=True))
        else:
            errors.append(StandardError(math.sqrt(own / count), between))
    return errors


@dataclass(frozen=True)
class Family:
    """Differences of which at most a share ``alpha`` of families has any false claim.

    Attributes:
        pooled: Number of differences whose standard errors contain a pooled variance.
        own: Number of differences with errors of their own.
        alpha: Probability of any false claim.
        sides: 2 for claims in either direction, 1 for claims in one.
    """

    pooled: int
    own: int
    alpha: float
    sides: int = 2

    def critical(self, df: float, *, is_pooled: bool) -> float:
        """Return the number of standard errors that a difference must exceed to be claimed."""
        total = self.pooled + self.own
        if not is_pooled or self.pooled == 1:
            return t_quantile(1 - self.alpha / (self.sides * total), df)
        share = self.alpha * self.pooled / total
        return _maximum_quantile(share, self.pooled, _round_df(df), self.sides)

    def p_value(self, t: float, df: float, *, is_pooled: bool) -> float:
        """Return the p-value of a difference, corrected for the family.

        Args:
            t: The difference over its standard error; with one side, positive where it is claimed.
            df: Degrees of freedom of the standard error.
            is_pooled: Whether the standard error contains the pooled variance.
        """
        total, size = self.pooled + self.own, abs(t) if self.sides == 2 else t
        if not is_pooled or self.pooled == 1:
            return min(1.0, total * self.sides * t_cdf(-size, df))
        if size <= 0:
            return 1.0
        outside = 1.0 - _maximum_cdf(size, self.pooled, _round_df(df), self.sides)
        return min(1.0, outside * total / self.pooled)


def _round_df(df: float) -> float:
    steps = math.floor(math.log(min(df, _MAX_DF)) / _DF_STEP + 1e-9)
    return max(1.0, math.exp(_DF_STEP * steps))


@lru_cache(maxsize=4096)
def _maximum_quantile(alpha: float, tests: int, df: float, sides: int) -> float:
    """Return the quantile of the largest of several studentized differences, by bisection."""
    high = t_quantile(1 - alpha / (sides * tests), df)  # Bonferroni's is never smaller
    low = t_quantile(1 - alpha / sides, df)
    for _ in range(50):
        middle = (low + high) / 2
        is_enough = 1.0 - _maximum_cdf(middle, tests, df, sides) <= alpha
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _maximum_cdf(t: float, tests: int, df: float, sides: int) -> float:
    """Return P(max <= t) of independent normal differences over one common standard error."""
    from scipy.special import ndtr  # type: ignore[import-untyped]

    scales, weights = _scale_density(df)
    inside = 2 * ndtr(t * scales) - 1 if sides == 2 else ndtr(t * scales)
    return float((weights * inside**tests).sum())


@lru_cache(maxsize=512)
def _scale_density(df: float) -> "tuple[NDArray[np.float64], NDArray[np.float64]]":
    """Return values and weights of sqrt(chi-square / df), evenly spaced in its logarithm."""
    import numpy as np

    logs = np.linspace(-20.0, 2.0, 1600)
    log_density = df * (logs - np.exp(2 * logs) / 2)
    weights = np.exp(log_density - log_density.max())
    return np.exp(logs), weights / weights.sum()
