"""Pooled standard errors: what all levels of a sweep say together about the noise of training.

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
    return StandardError(own, 1.0 if own_df == 1 else (pooled_df * own_df) ** 0.5)


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
