"""Standard errors, intervals and looks as `kvlab.analysis` describes them, with numpy and scipy.

Nothing of kvlab is imported, so an error there is not repeated here.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

import numpy as np
import pandas as pd
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
    item_error: float = 0.0  # of a share of items, the error that so many items give it
    reach: float = math.inf  # the largest difference that there can be: of shares of items alone

    @property
    def claim(self) -> str:
        return " and ".join(f"{factor}={level}" for factor, level in self.change)

    @property
    def value(self) -> float:
        return 0.0 if self.is_zero else float(np.mean([*self.by_seed.values()])) + self.shift

    @property
    def is_zero(self) -> bool:
        return max(map(abs, self.by_seed.values())) <= 1e-12 * self.scale

    @property
    def variance(self) -> float:
        """Variance over seeds; 0 if the differences are equal but for rounding."""
        variance = sample_variance(self.by_seed) if len(self.by_seed) > 1 else 0.0
        return variance if variance > (1e-12 * self.scale) ** 2 else 0.0

    @property
    def is_tested(self) -> bool:
        has_item_error = self.item_error > 0 and len(self.by_seed) > 1
        return has_item_error or (self.variance > 0 and not self.is_zero)

    def with_own_error(self) -> "Difference":
        seeds = len(self.by_seed)
        error = max(math.sqrt(self.variance / seeds), self.item_error)
        return replace(self, error=error, df=seeds - 1)


def sample_variance(values: BySeed) -> float:
    return float(np.var([*values.values()], ddof=1))


Weights = Mapping[Cell, float]
"""The weight of every training in a difference."""


def pool_errors(
    differences: Sequence[tuple[Difference, Weights]],
    values: Mapping[Cell, BySeed],
    all_seeds: bool = False,
) -> Callable[[Difference, Weights], Difference]:
    """Average the variance of one training over differences, or over trainings.

    Args:
        differences: At least one.
        values: Values of every training by seed, and of others.
        all_seeds: Whether trainings without pairs count at all of their seeds.

    Returns:
        Gives a difference the larger of its own error and the pooled one.
    """
    names = list(dict.fromkeys(name for _, own in differences for name in own))
    used = {name: values[name] for name in names}
    weights = np.array([[own.get(name, 0.0) for name in names] for _, own in differences])
    units = weights / np.linalg.norm(weights, axis=1, keepdims=True)
    freedom = np.array([len(one.by_seed) - 1 for one, _ in differences])
    noises = np.ones(len(names)), residual_variances(used)
    can_be_apart = len(differences) > 2 and {len(own) for _, own in differences} == {2}
    is_paired = not can_be_apart or do_seeds_explain(used)
    if is_paired:
        variances = [one.variance for one, _ in differences] / (weights**2).sum(axis=1)
        pooled = float(np.average(variances, weights=freedom))
        seeds = sorted({seed for one, _ in differences for seed in one.by_seed})
        present = [np.array([float(s in one.by_seed) for s in seeds]) for one, _ in differences]
        centring = [np.diag(p) - np.outer(p, p) / p.sum() for p in present]
        shared = np.einsum("iab,jab->ij", centring, centring)  # of the freedom of two variances
        covariances = [units * noise @ units.T for noise in noises]
        means = [shared.diagonal() @ one.diagonal() for one in covariances]
        spreads = [(shared * one**2).sum() for one in covariances]
    else:
        shares = np.average(units**2, axis=0, weights=freedom)
        pooled = float(shares @ [sample_variance(one) for one in used.values()])
        means = [shares @ noise for noise in noises]
        counts = np.array([len(one) - 1 for one in used.values()])
        spreads = [((shares * noise) ** 2 / counts).sum() for noise in noises]
    pooled_df = float(min(mean**2 / spread for mean, spread in zip(means, spreads, strict=True)))

    def larger(one: Difference, weights: Weights) -> Difference:
        seeds, df, variance, own_df = len(one.by_seed), pooled_df, one.variance, 1.0
        squares, shift = {name: w**2 for name, w in weights.items()}, 0.0
        if is_paired:
            df = max(1.0, df * (seeds - 1) / max(freedom))
            own_df = float(seeds - 1)
        else:
            if all_seeds:
                for name, weight in weights.items():
                    squares[name] *= seeds / len(values[name])
                    shift += weight * fmean(values[name].values())
                    shift -= weight * fmean(values[name][seed] for seed in one.by_seed)
            parts = {n: s * sample_variance(values[n]) for n, s in squares.items()}
            variance = sum(parts.values())
            own_df = variance**2 / sum(v**2 / (len(values[n]) - 1) for n, v in parts.items())
        one, whole = replace(one, shift=shift), pooled * sum(squares.values())
        if whole >= (1 - 1e-9) * variance:  # equal but for rounding
            return replace(one, error=math.sqrt(whole / seeds), df=df)
        own_df = 1.0 if is_paired and seeds == 2 else math.sqrt(df * own_df)
        return replace(one, error=math.sqrt(variance / seeds), df=own_df)

    return larger


def tabulate(values: Mapping[Cell, BySeed]) -> pd.DataFrame:
    """Return a row a value, without the seeds of a single training, which say nothing of seeds."""
    rows = [(n, s, v) for n, one in enumerate(values.values()) for s, v in one.items()]
    table = pd.DataFrame(rows, columns=["name", "seed", "value"])
    return table[table.groupby("seed").transform("size") > 1]


def fit(table: pd.DataFrame) -> pd.Series:
    """Return the squared residuals of least squares of training plus seed, summed by training."""
    design = pd.get_dummies(table[["name", "seed"]].astype(str)).to_numpy(float)
    fitted = design @ np.linalg.lstsq(design, table["value"].to_numpy(), rcond=None)[0]
    return ((table["value"] - fitted) ** 2).groupby(table["name"]).sum()


def do_seeds_explain(values: Mapping[Cell, BySeed]) -> bool:
    """Whether an F test at 5% finds that seeds explain something; True where it cannot be done."""
    table = tabulate(values)
    table = table[table.groupby("name").transform("size") > 1]
    names, seeds = table["name"].nunique(), table["seed"].nunique()
    left_df = len(table) - names - seeds + 1
    if names < 2 or left_df < 1:
        return True
    left, total = fit(table).sum(), table.groupby("name")["value"].var(ddof=0)
    total = (total * table.groupby("name").size()).sum()
    return bool(f.sf((total - left) / (seeds - 1) / (left / left_df), seeds - 1, left_df) < 0.05)


def residual_variances(values: Mapping[Cell, BySeed]) -> np.ndarray:
    """Return the variance of each training after `fit`; of one at a single seed, the average."""
    table = tabulate(values)
    counts = table.groupby("name").size()
    known = (
        fit(table)[counts > 1] / (counts[counts > 1] - 1) if len(table) else counts.astype(float)
    )
    average = known.mean() if len(known) else 0.0
    if average <= 0:
        return np.ones(len(values))
    return known.reindex(range(len(values)), fill_value=average).to_numpy()


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
        low, high = max(low, -one.reach), min(high, one.reach)
        judged[n] = replace(one, low=low, high=high, p=largest)
    return judged


# Shares of items


def find_items_metric(metric: str) -> str | None:
    """Return the metric that counts the items of a share; None of other metrics."""
    name = metric.removesuffix("_served")
    is_group = re.fullmatch(r"recall_\d+_(pairs|back)", name) is not None
    return f"{name}_items" if name == "recall" or is_group else None


def item_variance(share: float, items: float) -> float:
    """Return Agresti and Coull's variance: the share has two right and two wrong items more."""
    right, wrong = share * items + 2, (1 - share) * items + 2
    return right * wrong / (right + wrong) ** 2 / items


# Looks


def spent_error(fraction: float, alpha: float) -> float:
    """Return the error that may be spent after a fraction of the seeds."""
    return 2 * float(norm.sf(norm.isf(alpha / 2) / math.sqrt(fraction)))


@cache
def simulated_looks(sizes: tuple[int, ...]) -> np.ndarray:
    """Return |t| at every look, of sweeps without any difference; one row a look."""
    values = np.random.default_rng(7).standard_normal((sizes[-1], SIMULATED_SWEEPS))
    moments = [(values[:n].mean(axis=0), values[:n].std(axis=0, ddof=1), n) for n in sizes]
    return np.array([np.abs(mean) / sd * math.sqrt(n) for mean, sd, n in moments])


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
