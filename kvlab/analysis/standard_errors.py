"""Standard errors of differences that are judged together.

Pooled standard errors say what all levels of a sweep tell together about the noise of training.
With three seeds a level's own paired differences hardly tell their spread, and its t-test finds
little. If every training has the same variance, the variance over seeds of each difference, divided
by the squared length of its contrast, estimates that variance; the average over the differences
knows it much better. That is a model, so it is never used to shrink an error: the standard error is
the larger of a difference's own and the pooled one.

The degrees of freedom of the average are Satterthwaite's (1946). With K orthogonal contrasts over S
seeds and equal variances they are K(S-1). Differences that share cells, such as levels that are all
compared with one baseline cell, are correlated, and one cell that is far noisier than the others
makes all of them move together; either leaves fewer. So they are computed twice from the contrasts'
covariance, with equal variances and with the cells' own residual variances, and the fewer are used.
A difference that was seen at fewer seeds than another gets fewer in proportion. Where its own error
is the larger, its degrees of freedom are the geometric mean of the pooled and its own; at two seeds
its own single one.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

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


@dataclass(frozen=True)
class PooledVariance:
    """The variance of one training over seeds, averaged over contrasts.

    Attributes:
        variance: The average; a contrast has it times its squared length.
        df: Its degrees of freedom.
        most_seeds: The largest number of seeds of a contrast in it.
        contrasts: Number of contrasts in it.
    """

    variance: float
    df: float
    most_seeds: int
    contrasts: int

    def error(self, own_variance: float, squared_length: float, seeds: int) -> StandardError:
        """Return the larger of a mean contrast's own and the pooled standard error.

        Args:
            own_variance: The contrast's variance over its seeds.
            squared_length: Sum of its squared weights.
            seeds: Number of its seeds, from two on.
        """
        pooled_variance = self.variance * squared_length
        pooled_df = max(1.0, self.df * (seeds - 1) / (self.most_seeds - 1))
        if pooled_variance >= own_variance:
            error = math.sqrt(pooled_variance / seeds)
            return StandardError(error, pooled_df, is_pooled=self.contrasts > 1)
        df = 1.0 if seeds == 2 else math.sqrt(pooled_df * (seeds - 1))
        return StandardError(math.sqrt(own_variance / seeds), df)


def pool_variance(
    differences: Sequence[Mapping[int, float]],
    weights: Sequence[Mapping[Key, float]],
    values: Mapping[Key, Mapping[int, float]],
) -> PooledVariance:
    """Average the variance of one training over contrasts.

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
    return PooledVariance(pooled, df, int(counts.max()), len(differences))


def pool_errors(
    differences: Sequence[Mapping[int, float]],
    weights: Sequence[Mapping[Key, float]],
    values: Mapping[Key, Mapping[int, float]],
) -> list[StandardError]:
    """Return the larger of each contrast's own and the pooled standard error.

    Args: as of `pool_variance`.
    """
    import numpy as np

    pooled = pool_variance(differences, weights, values)
    return [
        pooled.error(
            float(np.var(list(one.values()), ddof=1)),
            math.fsum(weight * weight for weight in own.values()),
            len(one),
        )
        for one, own in zip(differences, weights, strict=True)
    ]


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
