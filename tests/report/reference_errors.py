"""Standard errors, intervals and looks as `kvlab.analysis` describes them, in plain loops.

Nothing of kvlab is imported, so an error there is not repeated here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np
from scipy.stats import f, norm, t

Cell = tuple[str, ...]
Change = tuple[tuple[str, str], ...]
BySeed = dict[int, float]

SIMULATED_SWEEPS = 1_000_000


@dataclass(frozen=True)
class Difference:
    """A weighted sum of cells over seeds."""

    change: Change  # the level, or the two levels; empty for a cell minus its reference
    by_seed: BySeed
    weights: dict[Cell, float]
    settings: dict[Cell, float]  # mean difference by the cell with the baseline's levels
    scale: float  # largest magnitude of a value in it
    metric: str = ""
    at: Change = ()  # levels of other factors beside which it is
    error: float = math.nan
    df: float = math.nan
    low: float = math.nan  # the simultaneous interval and the corrected p-value, once judged
    high: float = math.nan
    p: float = math.nan
    is_claimed: bool = True
    shift: float = 0.0  # what trainings at further seeds add to the mean over `by_seed`

    @property
    def claim(self) -> str:
        return " and ".join(f"{factor}={level}" for factor, level in self.change)

    @property
    def value(self) -> float:
        mean = float(np.mean(list(self.by_seed.values())))
        return 0.0 if self.is_zero else mean + self.shift

    @property
    def is_zero(self) -> bool:
        return max(map(abs, self.by_seed.values())) <= 1e-12 * self.scale

    @property
    def variance(self) -> float:
        """Variance over seeds; 0 if the differences are equal but for rounding."""
        if len(self.by_seed) < 2:
            return 0.0
        variance = float(np.var(list(self.by_seed.values()), ddof=1))
        return variance if variance > (1e-12 * self.scale) ** 2 else 0.0

    @property
    def is_tested(self) -> bool:
        return self.variance > 0 and not self.is_zero

    def with_own_error(self) -> "Difference":
        seeds = len(self.by_seed)
        return replace(self, error=math.sqrt(self.variance / seeds), df=seeds - 1)


Weighted = Sequence[tuple[Difference, Mapping[Cell, float]]]
"""Differences, each with the weight of every training in it."""


@dataclass(frozen=True)
class PooledVariance:
    variance: float
    df: float
    most_seeds: int
    is_paired: bool
    own: Mapping[Cell, tuple[float, int]]
    trainings: Mapping[Cell, BySeed]
    all_seeds: bool = False

    @classmethod
    def of(
        cls, differences: Weighted, values: Mapping[Cell, BySeed], all_seeds: bool = False
    ) -> "PooledVariance | None":
        """Average the variance of one training over differences, or over trainings.

        Args:
            differences: Each with the weight of every training in it.
            values: Values of every training by seed, and of others.
            all_seeds: Whether trainings without pairs count at all of their seeds.
        """
        if not differences:
            return None
        known = [name for name in values if len(values[name]) > 1]
        own = {n: (float(np.var([*values[n].values()], ddof=1)), len(values[n]) - 1) for n in known}
        most_seeds = max(len(one.by_seed) for one, _ in differences)
        rest = (values, all_seeds)
        values = {name: values[name] for _, weights in differences for name in weights}
        can_be_apart = len(differences) > 2 and {len(own) for _, own in differences} == {2}
        if not can_be_apart or do_seeds_explain(values):
            return cls(*pool_within_seeds(differences, values), most_seeds, True, own, *rest)
        return cls(*pool_over_trainings(differences, values, own), most_seeds, False, own, *rest)

    def larger(self, one: Difference, weights: Mapping[Cell, float]) -> Difference:
        """Give a difference the larger of its own error and the pooled one."""
        seeds, df, variance, shift = len(one.by_seed), self.df, one.variance, 0.0
        own_df, squares = float(seeds - 1), {name: w**2 for name, w in weights.items()}
        if self.is_paired:
            df = max(1.0, df * (seeds - 1) / (self.most_seeds - 1))
        else:
            if self.all_seeds:
                for name, weight in weights.items():
                    values = self.trainings[name]
                    squares[name] *= seeds / len(values)
                    shift += weight * fmean(values.values())
                    shift -= weight * fmean(values[seed] for seed in one.by_seed)
            parts = [(s * self.own[name][0], self.own[name][1]) for name, s in squares.items()]
            variance = sum(v for v, _ in parts)
            own_df = variance**2 / sum(v**2 / n for v, n in parts)
        one, pooled = replace(one, shift=shift), self.variance * sum(squares.values())
        if pooled >= (1 - 1e-9) * variance:  # equal but for rounding
            return replace(one, error=math.sqrt(pooled / seeds), df=df)
        own_df = 1.0 if self.is_paired and seeds == 2 else math.sqrt(df * own_df)
        return replace(one, error=math.sqrt(variance / seeds), df=own_df)


def do_seeds_explain(values: Mapping[Cell, BySeed]) -> bool:
    """Whether an F test at 5% finds that seeds explain something; True where it cannot be done."""
    values = without_lone_seeds(values)
    values = {name: by_seed for name, by_seed in values.items() if len(by_seed) > 1}
    counts = sum(map(len, values.values()))
    seeds = len({seed for by_seed in values.values() for seed in by_seed})
    left_df = counts - len(values) - seeds + 1
    if len(values) < 2 or left_df < 1:
        return True
    left = sum(v * (len(values[n]) - 1) for n, v in residual_variances(values).items())
    total = sum(float(np.var([*one.values()])) * len(one) for one in values.values())
    value = (total - left) / (seeds - 1) / (left / left_df)
    return bool(f.sf(value, seeds - 1, left_df) < 0.05)


def pool_within_seeds(differences: Weighted, values: Mapping[Cell, BySeed]) -> tuple[float, float]:
    """Return the variance of a training from differences within a seed, and its freedom."""
    total = degrees = 0.0
    for one, weights in differences:
        degrees += len(one.by_seed) - 1
        total += (len(one.by_seed) - 1) * one.variance / squared_length(weights)
    freedoms = []
    for noise in (dict.fromkeys(values, 1.0), residual_variances(values)):
        mean = spread = 0.0
        for one, own in differences:
            for other, theirs in differences:
                covariance = sum(own[n] * theirs[n] * noise[n] for n in own if n in theirs)
                covariance /= math.sqrt(squared_length(own) * squared_length(theirs))
                freedom = shared_freedom(list(one.by_seed), list(other.by_seed))
                spread += freedom * covariance**2
                mean += freedom * covariance if one is other else 0.0
        freedoms.append(mean**2 / spread)
    return total / degrees, min(freedoms)


def pool_over_trainings(
    differences: Weighted, values: Mapping[Cell, BySeed], own: Mapping[Cell, tuple[float, int]]
) -> tuple[float, float]:
    """Return the variance of a training from those of each difference's trainings, and its freedom.

    ``own`` is the variance of every training over its seeds, with its degrees of freedom.
    """
    shares: dict[Cell, float] = {}
    degrees = sum(len(one.by_seed) - 1 for one, _ in differences)
    for one, weights in differences:
        for name, weight in weights.items():
            part = weight**2 / squared_length(weights) * (len(one.by_seed) - 1) / degrees
            shares[name] = shares.get(name, 0.0) + part
    pooled = sum(share * own[name][0] for name, share in shares.items())
    freedoms = []
    for noise in (dict.fromkeys(values, 1.0), residual_variances(values)):
        parts = {name: share * noise[name] for name, share in shares.items()}
        spread = sum(part**2 / own[name][1] for name, part in parts.items())
        freedoms.append(sum(parts.values()) ** 2 / spread)
    return pooled, min(freedoms)


def without_lone_seeds(values: Mapping[Cell, BySeed]) -> dict[Cell, BySeed]:
    """Leave out the seeds of a single training, which say nothing of seeds."""
    every = [seed for by_seed in values.values() for seed in by_seed]
    return {n: {s: v for s, v in one.items() if every.count(s) > 1} for n, one in values.items()}


def squared_length(weights: Mapping[Cell, float]) -> float:
    return sum(weight * weight for weight in weights.values())


def shared_freedom(seeds: Sequence[int], others: Sequence[int]) -> float:
    """Return the part that seeds in common have in the covariance of two sample variances.

    It is the sum of products of the elements of both centring matrices.
    """
    shared = [seed for seed in seeds if seed in others]
    return sum(
        ((a == b) - 1 / len(seeds)) * ((a == b) - 1 / len(others)) for a in shared for b in shared
    )


def residual_variances(values: Mapping[Cell, BySeed]) -> dict[Cell, float]:
    """Return the variance of each training, after least squares of training plus seed."""
    values = without_lone_seeds(values)
    names, seeds = list(values), sorted({s for by_seed in values.values() for s in by_seed})
    rows = [(name, seed) for name in names for seed in values[name]]
    design = [
        [*(float(name == n) for n in names), *(float(seed == s) for s in seeds)]
        for name, seed in rows
    ]
    losses = np.array([values[name][seed] for name, seed in rows])
    fit = np.linalg.lstsq(np.array(design), losses, rcond=None)[0]
    squares = dict.fromkeys(names, 0.0)
    for (name, _), residual in zip(rows, losses - np.array(design) @ fit, strict=True):
        squares[name] += float(residual) ** 2
    known = {n: squares[n] / (len(values[n]) - 1) for n in names if len(values[n]) > 1}
    average = float(np.mean(list(known.values()))) if known else 0.0
    if average <= 0:
        return dict.fromkeys(names, 1.0)
    return {name: known.get(name, average) for name in names}


# Judging


def judge(
    differences: Sequence[Difference], alpha: float, margin: float | None
) -> list[Difference]:
    """Judge differences together: every level has an equal part, which its parts share."""
    tested = [n for n, one in enumerate(differences) if one.is_tested and one.is_claimed]
    levels = [(differences[n].metric, differences[n].change) for n in tested]
    weights = [1 / len(set(levels)) / levels.count(level) for level in levels]
    found = holm([differences[n] for n in tested], weights, alpha, margin)
    by_number = dict(zip(tested, found, strict=True))
    return [by_number.get(n, one) for n, one in enumerate(differences)]


def holm(
    differences: Sequence[Difference], weights: Sequence[float], alpha: float, margin: float | None
) -> list[Difference]:
    """Return differences with simultaneous intervals and p-values of Holm's weighted method."""
    own = [2 * float(t.sf(abs(one.value) / one.error, one.df)) for one in differences]
    order = sorted(range(len(own)), key=lambda n: own[n] / weights[n])
    judged, largest, left, passed_on = list(differences), 0.0, sum(weights), sum(weights)
    for n in order:
        one, weight = differences[n], weights[n]
        largest = max(largest, min(1.0, own[n] / weight * left / passed_on))
        reach = float(t.isf(alpha * weight / 2, one.df)) * one.error
        low, high = one.value - reach, one.value + reach
        left -= weight
        if margin is not None and not (-margin < low and high < margin):
            passed_on -= weight / 2  # a difference beyond the margin keeps half of its error
        if largest <= alpha:
            low, high = (max(low, 0.0), high) if one.value > 0 else (low, min(high, 0.0))
        judged[n] = replace(one, low=low, high=high, p=largest)
    return judged


def is_found(one: Difference) -> bool:
    """Whether a judged difference is not zero."""
    return one.low >= 0 or one.high <= 0


# Looks


def spent_error(fraction: float, alpha: float) -> float:
    """Return the error that may be spent after a fraction of the seeds."""
    return 2 * float(norm.sf(norm.isf(alpha / 2) / math.sqrt(fraction)))


@cache
def simulated_looks(sizes: tuple[int, ...]) -> np.ndarray:
    """Return |t| at every look, of sweeps without any difference; one row a look."""
    values = np.random.default_rng(7).standard_normal((sizes[-1], SIMULATED_SWEEPS))
    rows = []
    for size in sizes:
        mean, sd = values[:size].mean(axis=0), values[:size].std(axis=0, ddof=1)
        rows.append(np.abs(mean) / sd * math.sqrt(size))
    return np.array(rows)


@cache
def look_bound(sizes: tuple[int, ...], maximum: int, alpha: float) -> float:
    """Return the |t| at which the last of these looks rejects.

    What is rejected there and nowhere before has the probability that is newly spent. The part that
    was rejected before, too, is small, so simulating that part alone gives precise bounds.
    """
    spent = [spent_error(size / maximum, alpha) for size in sizes]
    bounds = [float(t.isf(spent[0] / 2, sizes[0] - 1))]
    for last in range(1, len(sizes)):
        looks = simulated_looks(sizes[: last + 1])
        is_over = (looks[:-1] >= np.array(bounds)[:, None]).any(axis=0)
        repeated = np.sort(looks[-1][is_over])
        low, high = 0.0, 1000.0
        for _ in range(60):
            middle = (low + high) / 2
            both = (len(repeated) - np.searchsorted(repeated, middle)) / SIMULATED_SWEEPS
            new = 2 * float(t.sf(middle, sizes[last] - 1)) - both
            low, high = (middle, high) if new > spent[last] - spent[last - 1] else (low, middle)
        bounds.append(high)
    return bounds[-1]


def spent_share(looks: Sequence[int], seeds: int, alpha: float) -> float:
    """Return the part of a level at which the bound of a look is an ordinary t-test's."""
    if seeds < 2 or seeds > looks[-1]:
        return 1.0
    sizes = (*(size for size in looks if 1 < size < seeds), seeds)
    bound = look_bound(sizes, looks[-1], alpha)
    return min(1.0, 2 * float(t.sf(bound, seeds - 1)) / alpha)
