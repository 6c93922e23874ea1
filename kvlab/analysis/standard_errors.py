"""Standard errors of differences that are judged together.

Pooled standard errors say what all levels of a sweep tell together about the noise of training.
With three seeds a level's own trainings hardly tell their spread, and its t-test finds little. If
every training has the same variance, the average over all trainings knows it much better. That is
a model, so it is never used to shrink an error: the standard error is the larger of a difference's
own and the pooled one.

Equal seeds mean equal batches and equal initial weights. Whether that makes the trainings of
different architectures alike is a question to the record, not an assumption: where an F test of the
seeds (`SeedEffect`) finds that they explain something, variances are those of differences within a
seed; elsewhere they are those of trainings, which have more degrees of freedom. Only three or more
differences of single cells may so give up their pairs (`can_give_up_pairs`). With one or two whose
cells spread unequally, errors of trainings are wrong in 6 to 7% of sweeps of two or three seeds. A
mean over several settings is wrong in 6 to 8% where levels vary with the seed: its trainings then
have noise in common that the F test of all cells does not find.

*Within seeds*: the variance over seeds of each difference, divided by the squared length of its
contrast, estimates the variance of a training. The degrees of freedom of the average are
Satterthwaite's (1946). Differences that share cells, such as levels that are all compared with one
baseline cell, are correlated, and one cell that is far noisier than the others makes all of them
move together; either leaves fewer. So they are computed twice from the contrasts' covariance, with
equal variances and with the cells' own residual variances, and the fewer are used. A difference
that was seen at fewer seeds than another gets fewer in proportion.

*Over trainings*: the same average, where the variance of a difference is the sum of its trainings'
variances, times their squared weights. So a baseline that all levels are compared with has half of
it: were all trainings to count alike, a baseline that is noisier than its levels would make too
many differences wrong together. The degrees of freedom are Satterthwaite's, too, the fewer of those
with equal variances and with the residual ones.

Where a difference's own error is the larger, its degrees of freedom are the geometric mean of the
pooled and its own; at two seeds of differences within seeds its own single one.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


Key = TypeVar("Key", bound=Hashable)

SEED_ALPHA = 0.05
"""Probability of the F test of seeds to find an effect where there is none."""

MIN_UNPAIRED = 3
"""Differences from which on pairs may be given up; with fewer, intervals are wrong too often."""

_PAIR = 2  # a cell and the one that it is compared with

_ROUNDING = 1e-9
"""Relative difference of variances that are equal but for rounding, which machines do not share."""


@dataclass(frozen=True)
class StandardError:
    """The error that a difference is tested with.

    Attributes:
        value: The standard error, in the unit of the difference.
        is_pooled: Whether it is the pooled one, the larger of the two.
        is_paired: Whether it is that of differences within a seed, not that of trainings.
        shift: What trainings at further seeds add to the mean of the differences within a seed.
    """

    value: float
    df: float
    is_pooled: bool = False
    is_paired: bool = True
    shift: float = 0.0


@dataclass(frozen=True)
class SeedEffect:
    """What seeds explain of the noise of trainings, from a table of trainings by seeds.

    Attributes:
        spread_ratio: Spread of what is left after the seeds, by that of trainings over their seeds:
            below 1 where pairing by seeds removes noise.
        p: Of the F test that seeds explain nothing.
    """

    spread_ratio: float
    p: float

    @property
    def is_found(self) -> bool:
        """Whether differences within a seed are less noisy than trainings."""
        return self.p < SEED_ALPHA


@dataclass(frozen=True)
class PooledVariance(Generic[Key]):
    """The variance of one training over seeds, averaged over contrasts.

    Attributes:
        variance: The average; a contrast has it times its squared length.
        most_seeds: The largest number of seeds of a contrast in it.
        is_paired: Whether variances are those of differences within a seed.
        own: Training -> its values by seed, and their variance.
        all_seeds: Whether the mean of a training is over all of its seeds, not the contrast's.
    """

    variance: float
    df: float
    most_seeds: int
    contrasts: int
    is_paired: bool
    own: Mapping[Key, tuple[Mapping[int, float], float]]
    all_seeds: bool = False

    def error(
        self, weights: Mapping[Key, float], paired_variance: float, seeds: Collection[int]
    ) -> StandardError:
        """Return the larger of a mean contrast's own and the pooled standard error.

        Args:
            weights: The contrast: the weight of every training in it.
            paired_variance: The variance of the contrast over its seeds.
            seeds: Its seeds, at least two.
        """
        count, shift, squares = len(seeds), 0.0, {key: w * w for key, w in weights.items()}
        pooled_df, own, own_df = self.df, paired_variance, float(count - 1)
        if self.is_paired:
            pooled_df = max(1.0, self.df * (count - 1) / (self.most_seeds - 1))
        else:
            if self.all_seeds:
                squares = {key: s * (count / len(self.own[key][0])) for key, s in squares.items()}
                for key, weight in weights.items():
                    values = self.own[key][0]
                    if len(values) > count:
                        at_seeds = fmean(values[seed] for seed in seeds)
                        shift += weight * (fmean(values.values()) - at_seeds)
            parts = {key: square * self.own[key][1] for key, square in squares.items()}
            own = math.fsum(parts.values())
            scale = math.fsum(p * p / (len(self.own[key][0]) - 1) for key, p in parts.items())
            own_df = own * own / scale if scale else own_df
        pooled = self.variance * math.fsum(squares.values())
        if pooled >= (1 - _ROUNDING) * own:
            error, df, is_pooled = math.sqrt(pooled / count), pooled_df, self.contrasts > 1
        else:
            df = 1.0 if self.is_paired and count == 2 else math.sqrt(pooled_df * own_df)
            error, is_pooled = math.sqrt(own / count), False
        return StandardError(error, df, is_pooled, self.is_paired, shift)


def measure_seed_effect(values: Iterable[Mapping[int, float]]) -> SeedEffect | None:
    """Compare what seeds explain with what they leave; None if two trainings share no two seeds.

    Args:
        values: Of each training, its value by seed.
    """
    from scipy.special import fdtrc  # type: ignore[import-untyped]

    table = _table_by_seed([one for one in values if len(one) > 1])
    table = table[(~np.isnan(table)).sum(axis=1) > 1]
    if len(table) < 2 or table.shape[1] < 2:
        return None
    within = table - np.nanmean(table, axis=1, keepdims=True)
    total, left = np.nansum(within**2), np.nansum(_remove_cells_and_seeds(table) ** 2)
    total_df = int((~np.isnan(table)).sum()) - len(table)
    seed_df = table.shape[1] - 1
    left_df = total_df - seed_df
    if left_df < 1 or not left > 0:
        return None
    ratio = math.sqrt(float(left / left_df) / float(total / total_df))
    p = fdtrc(seed_df, left_df, float((total - left) / seed_df / (left / left_df)))
    return SeedEffect(ratio, float(p))


def can_give_up_pairs(weights: Sequence[Mapping[Key, float]]) -> bool:
    """Whether differences may be judged by errors of trainings, if seeds explain nothing.

    Args:
        weights: Of each difference, the weight of every training in it.
    """
    return len(weights) >= MIN_UNPAIRED and all(len(one) == _PAIR for one in weights)


def pool_variance(
    differences: Sequence[Mapping[int, float]],
    weights: Sequence[Mapping[Key, float]],
    values: Mapping[Key, Mapping[int, float]],
    *,
    all_seeds: bool = False,
) -> PooledVariance[Key]:
    """Average the variance of one training over contrasts.

    Args:
        differences: Of each contrast, its value by seed; at least two seeds each, which may differ.
        weights: Of each contrast, the weight of every training in it; not all zero.
        values: Training -> value by seed, of all trainings that have a weight.
        all_seeds: Whether trainings without pairs count at seeds that their contrast lacks, too.
            Not where seeds were added for what the first ones have shown.
    """
    keys = list(dict.fromkeys(key for one in weights for key in one))
    found = {key: by_seed for key, by_seed in values.items() if len(by_seed) > 1}
    own = {k: (one, float(np.var(list(one.values()), ddof=1))) for k, one in found.items()}
    matrix = np.array([[one.get(key, 0.0) for key in keys] for one in weights])
    matrix /= np.sqrt((matrix**2).sum(axis=1, keepdims=True))
    used = [values[key] for key in keys]
    seeds = measure_seed_effect(used)
    is_paired = not can_give_up_pairs(weights) or seeds is None or seeds.is_found
    counts, noise = np.array([len(one) for one in differences]), _residual_variances(used)
    if is_paired:
        lengths = [math.fsum(weight * weight for weight in one.values()) for one in weights]
        variances = np.array([np.var(list(one.values()), ddof=1) for one in differences])
        variance = float(((counts - 1) * variances / lengths).sum() / (counts - 1).sum())
        overlaps = _shared_freedom(differences)
        df = math.inf
        for parts in (np.ones(len(keys)), noise):  # Satterthwaite's, of the average variance
            covariance = (matrix * parts) @ matrix.T
            mean = float((overlaps.diagonal() * covariance.diagonal()).sum())
            df = min(df, mean**2 / float((covariance**2 * overlaps).sum()))
    else:
        shares = np.average(matrix**2, axis=0, weights=counts - 1)
        freedom = np.array([len(one) - 1 for one in used])
        variance = float((shares * np.array([own[key][1] for key in keys])).sum())
        both = (shares, shares * noise)
        df = min(float(one.sum() ** 2 / (one**2 / freedom).sum()) for one in both)
    most = max(len(one) for one in differences)
    return PooledVariance(variance, df, most, len(differences), is_paired, own, all_seeds)


def pool_errors(
    differences: Sequence[Mapping[int, float]],
    weights: Sequence[Mapping[Key, float]],
    values: Mapping[Key, Mapping[int, float]],
    *,
    all_seeds: bool = False,
) -> list[StandardError]:
    """Return the larger of each contrast's own and the pooled standard error.

    Args: As of `pool_variance`. A contrast without weights, such as that of a level of serving,
        keeps its own error.
    """
    chosen = [n for n, own in enumerate(weights) if own]
    variances = [float(np.var(list(one.values()), ddof=1)) for one in differences]
    errors = [
        StandardError(math.sqrt(variance / len(one)), len(one) - 1)
        for one, variance in zip(differences, variances, strict=True)
    ]
    if chosen:
        parts = [differences[n] for n in chosen], [weights[n] for n in chosen]
        pooled = pool_variance(*parts, values, all_seeds=all_seeds)
        for n in chosen:
            errors[n] = pooled.error(weights[n], variances[n], differences[n].keys())
    return errors


def _shared_freedom(differences: Sequence[Mapping[int, float]]) -> Array:
    """Return the degrees of freedom that each two variances share; a variance's own with itself.

    The covariance of the variances of two samples with a and b members, o of them at common seeds,
    is 2 c**2 f / ((a-1) (b-1)) for a covariance c of the members and f = o - o/a - o/b + o**2/(ab).
    """
    seeds = sorted(set().union(*differences))
    present = np.array([[float(seed in one) for seed in seeds] for one in differences])
    shared, counts = present @ present.T, present.sum(axis=1)
    result: Array = (
        shared - shared / counts - shared / counts[:, None] + shared**2 / np.outer(counts, counts)
    )
    return result


def _residual_variances(values: Sequence[Mapping[int, float]]) -> Array:
    """Return the variance of each training over seeds, after what the seeds share.

    A training at one seed gets the average.
    """
    table = _table_by_seed(values)
    is_known = (~np.isnan(table)).sum(axis=1) > 1
    if not is_known.any():
        return np.ones(len(values))
    known = table[is_known]
    squares = np.nansum(_remove_cells_and_seeds(known) ** 2, axis=1)
    found: Array = squares / ((~np.isnan(known)).sum(axis=1) - 1)
    average = float(found.mean())
    variances = np.full(len(values), average)
    variances[is_known] = found
    return variances if average > 1e-150 else np.ones(len(values))  # the square must not be 0


def _table_by_seed(values: Sequence[Mapping[int, float]]) -> Array:
    """Return the values with a row a training and a column a seed; NaN where there is none.

    A seed of a single training says nothing of seeds, so it has no column.
    """
    counts = Counter(seed for one in values for seed in one)
    seeds = sorted(seed for seed, count in counts.items() if count > 1)
    table: Array = np.array([[one.get(seed, np.nan) for seed in seeds] for one in values])
    return table.reshape(len(values), len(seeds))


def _remove_cells_and_seeds(table: Array) -> Array:
    """Return what is left after means of rows and of columns, fitted by turns."""
    for _ in range(20 if np.isnan(table).any() else 1):
        table = table - np.nanmean(table, axis=1, keepdims=True)
        table = table - np.nanmean(table, axis=0)
    return table
