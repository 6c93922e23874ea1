"""Rank cells, and say which cannot be told apart from the best.

Cells are ranked by the baseline's mean plus their paired difference from it, over the seeds that
both have: means over unequal seeds would rank the seeds. A cell that shares no seed with the
baseline is compared with the ranked cell that shares most seeds with it.

The standard error of a difference is that of the effects: the larger of its own and the one pooled
over the differences of all cells from the baseline (`kvlab.analysis.standard_errors`). Cells that
share trained weights, and cells that are served otherwise than they were trained, keep their own.

*Against the best* (Hsu 1984, Edwards and Hsu 1983): every cell in turn is the one that all others
are compared with, and is out if one of them beats it. With 95% probability the true best cell is
among those that are left, which bounds what a choice among them can lose.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray

from kvlab.analysis.matched_pairs import group_by_training
from kvlab.analysis.standard_errors import PooledVariance, pool_variance
from kvlab.analysis.statistics import Estimate, t_cdf, t_quantile
from kvlab.analysis.trial_rows import Levels

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Best:
    """The best of several cells.

    Attributes:
        levels: The cell with the best mean.
        rivals: Cells that may be the best instead, by their means.
        largest_loss: Upper bound of how much worse ``levels`` is than the truly best cell; None
            where there is no bound, as with one seed.
    """

    levels: Levels
    rivals: tuple[Levels, ...]
    largest_loss: float | None


@dataclass(frozen=True)
class _Differences:
    """One cell minus each cell, in a direction in which lower is better.

    Attributes:
        seeds: Number of seeds that both have.
        value: Mean paired difference; NaN without a shared seed.
        error: Standard error; NaN if the difference cannot be tested, 0 if it is exact.
        df: Degrees of freedom of ``error``.
    """

    seeds: Vector
    value: Vector
    error: Vector
    df: Vector


class Ranking:
    """Cells of one sweep in one metric.

    Args:
        values: Cell -> values by seed. Cells without a value are left out.
        baseline: The cell that means are anchored at.
        trainings: Cell -> ids of its trainings. Cells that share one keep errors of their own.
        noisy: Cells whose serving adds a noise of its own; they keep their own errors.
        in_steps: Whether the metric is a share of items, whose differences may be equal by chance.
        alpha: Probability of any false claim among those that are made together.
        all_seeds: As of `kvlab.analysis.standard_errors.pool_variance`.
        item_variances: Of a share, each cell's variance by its items: its errors are its own, and
            no smaller than these give.
    """

    def __init__(
        self,
        values: Mapping[Levels, Mapping[int, float]],
        baseline: Levels,
        trainings: Mapping[Levels, Collection[str]],
        *,
        noisy: Collection[Levels] = (),
        higher_is_better: bool = False,
        in_steps: bool = False,
        alpha: float = 0.05,
        all_seeds: bool = False,
        item_variances: Mapping[Levels, float] | None = None,
    ):
        self.cells = tuple(levels for levels, by_seed in values.items() if by_seed)
        seeds = sorted({seed for levels in self.cells for seed in values[levels]})
        table = [[values[levels].get(seed, np.nan) for seed in seeds] for levels in self.cells]
        self._index = {levels: number for number, levels in enumerate(self.cells)}
        self._sign = -1.0 if higher_is_better else 1.0
        self._losses = self._sign * np.array(table).reshape(len(self.cells), len(seeds))
        self._groups = group_by_training([trainings.get(levels, ()) for levels in self.cells])
        self._is_noisy = np.array([levels in noisy for levels in self.cells], dtype=bool)
        self._rounding = 1e-12 * float(np.nanmax(np.abs(self._losses), initial=1e-300))
        self._baseline, self._in_steps, self._alpha = baseline, in_steps, alpha
        self._all_seeds, self._item_variances = all_seeds, item_variances
        self._differences = cache(self._compare)

    @property
    def _anchor(self) -> int:
        """The baseline, or the cell with most seeds if the baseline has none."""
        counts = np.sum(~np.isnan(self._losses), axis=1)
        return self._index.get(self._baseline, int(counts.argmax()))

    @cached_property
    def means(self) -> dict[Levels, float]:
        """The mean of every cell, as if it had the seeds of the baseline."""
        if not self.cells:
            return {}
        anchor = self._anchor
        losses = {anchor: float(np.nanmean(self._losses[anchor]))}
        waiting = [number for number in range(len(self.cells)) if number != anchor]
        while waiting:
            links = {one: self._closest(one, list(losses), anchor) for one in waiting}
            reached = {one: other for one, other in links.items() if other is not None}
            if not reached:
                break  # no seed in common with any ranked cell: no rank
            losses |= {
                one: losses[other] + float(self._differences(one).value[other])
                for one, other in reached.items()
            }
            waiting = [one for one in waiting if one not in reached]
        return {self.cells[one]: self._sign * losses[one] for one in sorted(losses)}

    def _closest(self, one: int, ranked: Sequence[int], anchor: int) -> int | None:
        """Return the anchor if it shares a seed, else the ranked cell that shares most seeds."""
        shared = self._differences(one).seeds
        if shared[anchor]:
            return anchor
        other = max(ranked, key=lambda number: (shared[number], -number))
        return other if shared[other] else None

    def best_first(self, cells: Iterable[Levels]) -> list[Levels]:
        """Sort cells that have a mean, the best first; ties in the order of the design."""
        losses = {c: self._sign * self.means[c] for c in cells if c in self.means}
        return sorted(losses, key=lambda levels: (losses[levels], self._index[levels]))

    def difference(self, one: Levels, other: Levels) -> Estimate | None:
        """Estimate ``one`` minus ``other``, with the 95% interval of this difference alone.

        Returns:
            None if the two share no seed.
        """
        if one not in self._index or other not in self._index:
            return None
        row, number = self._differences(self._index[one]), self._index[other]
        if not row.seeds[number]:
            return None
        value = self._sign * float(row.value[number])
        error, df = float(row.error[number]), float(row.df[number])
        if abs(value) <= self._rounding and not error > 0:
            return Estimate(0.0, "identical")
        if row.seeds[number] < 2:
            return Estimate(value, "one seed", low=value, high=value)
        if error != error:
            return Estimate(value, "unvaried", low=value, high=value)
        if error == 0:
            return Estimate(value, "exact", low=value, high=value, p=0.0)
        half = t_quantile(1 - self._alpha / 2, df) * error
        p = 2 * t_cdf(-abs(value) / error, df)
        return Estimate(value, "tested", error, df, value - half, value + half, p)

    def best(self, cells: Collection[Levels], *, choices: int = 1) -> Best | None:
        """Return the best of several cells, and those that may be the best instead.

        Args:
            cells: The cells to choose from.
            choices: Number of sets of cells that claims are made about together.

        Returns:
            The best cell; None if none of the cells has a mean.
        """
        ranked = self.best_first(cells)
        if not ranked:
            return None
        numbers = np.array([self._index[levels] for levels in ranked])
        is_chosen = np.zeros(len(self.cells), bool)
        is_chosen[numbers] = True
        alpha = self._alpha / choices
        criticals = {n: self._criticals(n, is_chosen, alpha) for n in numbers.tolist()}
        left = [
            one
            for one in criticals
            if all(self._lower_bound(one, n, criticals[one]) <= 0 for n in criticals if n != one)
        ]
        first, *rivals = left or numbers.tolist()
        losses = [-self._lower_bound(rival, first, criticals[rival]) for rival in rivals]
        bound = max([0.0, *losses])
        if self._item_variances is not None:
            bound = min(bound, 1.0)  # shares cannot differ by more
        return Best(
            self.cells[first],
            tuple(self.cells[n] for n in rivals),
            None if bound == float("inf") else bound,
        )

    def _lower_bound(self, one: int, other: int, criticals: Vector) -> float:
        """Return the lower bound of how much worse a cell is than another one."""
        row = self._differences(one)
        if abs(row.value[other]) <= self._rounding and not row.error[other] > 0:
            return 0.0 if row.seeds[other] > 1 else -float("inf")
        if not row.error[other] >= 0:
            return -float("inf")
        return float(row.value[other] - criticals[other] * row.error[other])

    def told_apart(self, one: Levels, other: Levels) -> bool:
        """Whether ``one`` is better than ``other``, where any of all cells may have been picked."""
        number = self._index[other]
        row = self._differences(self._index[one])
        error = float(row.error[number])
        if error != error or not row.seeds[number]:
            return False
        loss = float(row.value[number])
        if error == 0:
            return loss < -self._rounding
        return t_cdf(loss / error, float(row.df[number])) < self._alpha / len(self.cells)

    def _criticals(self, one: int, is_chosen: NDArray[np.bool_], alpha: float) -> Vector:
        """Return the critical value of a cell's comparison with each of the chosen cells."""
        row = self._differences(one)
        is_tested = (row.error > 0) & is_chosen
        level = 1 - alpha / max(1, int(is_tested.sum()))
        found = np.zeros(len(self.cells))
        for other in np.flatnonzero(is_tested).tolist():
            found[other] = t_quantile(level, float(row.df[other]))
        return found

    def _compare(self, one: int) -> _Differences:
        """Estimate one cell minus each cell, over the seeds that both have."""
        differences = self._losses[one] - self._losses
        is_shared = ~np.isnan(differences)
        seeds = is_shared.sum(axis=1).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.where(is_shared, differences, 0.0).sum(axis=1) / seeds
            spread = np.where(is_shared, differences - value[:, None], 0.0)
            own = (spread**2).sum(axis=1) / (seeds - 1)
            own[own <= self._rounding**2] = 0.0
            error, df = np.sqrt(own / seeds), seeds - 1
        if self._pooled is not None:
            apart = ~self._is_noisy & (self._groups != self._groups[one]) & (seeds > 1)
            for other in np.flatnonzero(apart & (not self._is_noisy[one])).tolist():
                pair = {one: 1.0, other: -1.0}
                common = np.flatnonzero(is_shared[other]).tolist()
                found = self._pooled.error(pair, float(own[other]), common)
                error[other], df[other] = found.value, found.df
                value[other] += found.shift
        if self._item_variances is not None:
            of_items = np.array([self._item_variances[levels] for levels in self.cells])
            with np.errstate(divide="ignore"):
                least = np.sqrt((of_items + of_items[one]) / seeds)
            is_chance = (self._groups != self._groups[one]) | (np.abs(value) > self._rounding)
            error = np.where(is_chance, np.maximum(error, least), error)
        if self._in_steps:
            error[(error == 0) & (np.abs(value) > self._rounding)] = np.nan
        error[seeds < 2] = np.nan
        error[one] = np.nan
        return _Differences(seeds, value, error, df)

    @cached_property
    def _pooled(self) -> PooledVariance[int] | None:
        """Pool the differences from the anchor of all cells that were trained apart from it."""
        if not self.cells or self._item_variances is not None:
            return None
        anchor = self._anchor
        differences, weights = [], []
        for one in range(len(self.cells)):
            shared = ~np.isnan(self._losses[one] - self._losses[anchor])
            is_first = int(np.flatnonzero(self._groups == self._groups[one])[0]) == one
            if self._groups[one] == self._groups[anchor] or self._is_noisy[one]:
                continue
            if is_first and not self._is_noisy[anchor] and shared.sum() > 1:
                by_seed = (self._losses[one] - self._losses[anchor])[shared].tolist()
                seeds = np.flatnonzero(shared).tolist()
                differences.append(dict(zip(seeds, by_seed, strict=True)))
                weights.append({one: 1.0, anchor: -1.0})
        quiet = np.flatnonzero(~self._is_noisy).tolist()
        rows = {n: dict(enumerate(self._losses[n].tolist())) for n in quiet}
        values = {n: {s: v for s, v in by_seed.items() if v == v} for n, by_seed in rows.items()}
        if not differences:
            return None
        pooled = pool_variance(differences, weights, values, all_seeds=self._all_seeds)
        return pooled if pooled.variance > 0 else None
