"""Rank cells, compare all of them with one, and say which cannot be told apart from the best.

Cells are ranked by the baseline's mean plus their paired difference from it, over the seeds that
both have: means over unequal seeds would rank the seeds. A cell that shares no seed with the
baseline is compared with the ranked cell that shares most seeds with it.

The standard error of a difference is the larger of its own (paired differences over seeds) and a
pooled one (two-way residuals of cells by seeds, one cell per training). Cells that share trained
weights keep their own. What is claimed together is corrected together:

- *Against one cell* (Dunnett 1955): intervals of all differences hold at once, also that of a cell
  that was picked because it looked best.
- *Against the best* (Hsu 1984, Edwards and Hsu 1983): every cell in turn is the one that all others
  are compared with, and is out if one of them beats it. With 95% probability the true best cell is
  among those that are left, which bounds what a choice among them can lose.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvlab.analysis.simultaneous_intervals import Family, PooledVariance, pool_variance
from kvlab.analysis.statistics import Estimate, t_cdf
from kvlab.analysis.trial_rows import Levels

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]
    Mask = NDArray[np.bool_]

BySeed = Mapping[int, float]


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
        is_pooled: Whether ``error`` contains the pooled variance.
    """

    seeds: "Vector"
    value: "Vector"
    error: "Vector"
    df: "Vector"
    is_pooled: "Mask"

    @property
    def is_tested(self) -> "Mask":
        return self.error > 0


class Ranking:
    """Cells of one sweep in one metric.

    Args:
        values: Cell -> values by seed. Cells without a value are left out.
        baseline: The cell that means are anchored at.
        trainings: Cell -> ids of its trainings. Cells that share one keep errors of their own.
        higher_is_better: The direction of the metric.
        in_steps: Whether the metric is a share of items, whose differences may be equal by chance.
        alpha: Probability of any false claim among those that are made together.
    """

    def __init__(
        self,
        values: Mapping[Levels, BySeed],
        baseline: Levels,
        trainings: Mapping[Levels, Collection[str]],
        *,
        higher_is_better: bool = False,
        in_steps: bool = False,
        alpha: float = 0.05,
    ):
        import numpy as np

        self.cells = tuple(levels for levels, by_seed in values.items() if by_seed)
        seeds = sorted({seed for levels in self.cells for seed in values[levels]})
        table = [[values[levels].get(seed, np.nan) for seed in seeds] for levels in self.cells]
        self._index = {levels: number for number, levels in enumerate(self.cells)}
        self._sign = -1.0 if higher_is_better else 1.0
        self._losses = self._sign * np.array(table).reshape(len(self.cells), len(seeds))
        self._groups = _group_by_training([trainings.get(levels, ()) for levels in self.cells])
        self._rounding = 1e-12 * float(np.nanmax(np.abs(self._losses), initial=1e-300))
        self._baseline, self._in_steps, self._alpha = baseline, in_steps, alpha
        self._rows: dict[int, _Differences] = {}

    @cached_property
    def means(self) -> dict[Levels, float]:
        """The mean of every cell, as if it had the seeds of the baseline."""
        import numpy as np

        if not self.cells:
            return {}
        counts = np.sum(~np.isnan(self._losses), axis=1)
        anchor = self._index.get(self._baseline, int(counts.argmax()))
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

    def against(self, reference: Levels) -> dict[Levels, Estimate]:
        """Estimate every other cell minus ``reference``, with simultaneous intervals.

        Returns:
            Cell -> estimate, whose interval, p-value and test hold for all cells together; without
            the cells that share no seed with ``reference``.
        """
        import numpy as np

        if reference not in self._index:
            return {}
        number = self._index[reference]
        row = self._differences(number)
        family = self._family(row, np.ones(len(self.cells), bool), self._alpha, sides=2)
        return {
            levels: self._estimate(row, other, family)
            for other, levels in enumerate(self.cells)
            if other != number and row.seeds[other]
        }

    def _estimate(self, row: _Differences, other: int, family: Family) -> Estimate:
        value = -self._sign * float(row.value[other])
        error, df = float(row.error[other]), float(row.df[other])
        if abs(value) <= self._rounding and not error > 0:
            return Estimate(0.0, "identical")
        if row.seeds[other] < 2:
            return Estimate(value, "one seed", low=value, high=value)
        if error != error:
            return Estimate(value, "unvaried", low=value, high=value)
        if error == 0:
            return Estimate(value, "exact", low=value, high=value, p=0.0)
        is_pooled = bool(row.is_pooled[other])
        half = family.critical(df, is_pooled=is_pooled) * error
        p = family.p_value(value / error, df, is_pooled=is_pooled)
        return Estimate(value, "tested", error, round(df), value - half, value + half, p)

    def best(self, cells: Collection[Levels], *, choices: int = 1) -> Best | None:
        """Return the best of several cells, and those that may be the best instead.

        Args:
            cells: The cells to choose from.
            choices: Number of sets of cells that claims are made about together.

        Returns:
            The best cell; None if none of the cells has a mean.
        """
        import numpy as np

        ranked = self.best_first(cells)
        if not ranked:
            return None
        numbers = np.array([self._index[levels] for levels in ranked])
        is_chosen = np.zeros(len(self.cells), bool)
        is_chosen[numbers] = True
        alpha = self._alpha / choices
        criticals = {n: self._criticals(n, is_chosen, alpha) for n in numbers.tolist()}
        left = [n for n in numbers.tolist() if not self._is_beaten(n, numbers, criticals[n])]
        first, *rivals = left or numbers.tolist()
        losses = [-self._lower_bound(rival, first, criticals[rival]) for rival in rivals]
        bound = max([0.0, *losses])
        return Best(
            self.cells[first],
            tuple(self.cells[n] for n in rivals),
            None if bound == float("inf") else bound,
        )

    def _is_beaten(self, one: int, others: "NDArray[np.intp]", criticals: "Vector") -> bool:
        return any(self._lower_bound(one, n, criticals) > 0 for n in others.tolist() if n != one)

    def _lower_bound(self, one: int, other: int, criticals: "Vector") -> float:
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

    def _criticals(self, one: int, is_chosen: "Mask", alpha: float) -> "Vector":
        """Return the critical value of a cell's comparison with each of the chosen cells."""
        import numpy as np

        row = self._differences(one)
        family = self._family(row, is_chosen, alpha, sides=1)
        found = np.zeros(len(self.cells))
        for other in np.flatnonzero(row.is_tested & is_chosen).tolist():
            is_pooled = bool(row.is_pooled[other])
            found[other] = family.critical(float(row.df[other]), is_pooled=is_pooled)
        return found

    @staticmethod
    def _family(row: _Differences, is_chosen: "Mask", alpha: float, sides: int) -> Family:
        tested = row.is_tested & is_chosen
        pooled = int((tested & row.is_pooled).sum())
        return Family(pooled, int(tested.sum()) - pooled, alpha, sides)

    def _differences(self, one: int) -> _Differences:
        if one not in self._rows:
            self._rows[one] = self._compare(one)
        return self._rows[one]

    def _compare(self, one: int) -> _Differences:
        """Estimate one cell minus each cell, over the seeds that both have."""
        import numpy as np

        differences = self._losses[one] - self._losses
        is_shared = ~np.isnan(differences)
        seeds = is_shared.sum(axis=1).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = np.where(is_shared, differences, 0.0).sum(axis=1) / seeds
            spread = np.where(is_shared, differences - value[:, None], 0.0)
            own = (spread**2).sum(axis=1) / (seeds - 1)
            own[own <= self._rounding**2] = 0.0
            is_pooled = (self._groups != self._groups[one]) & (self._pooled.variance > 0)
            pooled = np.where(is_pooled, 2 * self._pooled.variance, 0.0)
            error = np.sqrt(np.maximum(own, pooled) / seeds)
            df_between = np.sqrt(np.maximum(1.0, (seeds - 1) * self._pooled.df))
        is_typical = (own <= pooled) & (seeds == len(self._losses[one]))
        df = np.where(is_pooled, np.where(is_typical, self._pooled.df, df_between), seeds - 1)
        if self._in_steps:
            error[(error == 0) & (np.abs(value) > self._rounding)] = np.nan
        error[seeds < 2] = np.nan
        error[one] = np.nan
        return _Differences(seeds, value, error, df, is_pooled)

    @cached_property
    def _pooled(self) -> PooledVariance:
        """Pool the residuals of cells by seeds, with one cell per group of shared trainings."""
        import numpy as np

        counts = np.sum(~np.isnan(self._losses), axis=1)
        groups = sorted(set(self._groups.tolist()))
        members = (np.flatnonzero(self._groups == group) for group in groups)
        chosen = [int(cells[counts[cells].argmax()]) for cells in members]
        residuals, df = _two_way_residuals(self._losses[chosen])
        residuals[np.abs(residuals) <= self._rounding] = 0.0
        return pool_variance(residuals, df, df / max(1, len(chosen) - 1))


def _group_by_training(trainings: Sequence[Collection[str]]) -> "NDArray[np.intp]":
    """Number the cells such that those that share a training have the same number."""
    import numpy as np

    numbers = np.arange(len(trainings))
    first: dict[str, int] = {}
    for index, ids in enumerate(trainings):
        for training in filter(None, ids):
            other = first.setdefault(training, index)
            numbers[numbers == numbers[index]] = numbers[other]
    return numbers


def _two_way_residuals(values: "Vector") -> "tuple[Vector, float]":
    """Fit cell plus seed by least squares.

    Args:
        values: (cells, seeds) NaN where missing.

    Returns:
        Residuals, 0 where a value is missing, and their degrees of freedom.
    """
    import numpy as np

    is_there = ~np.isnan(values)
    n_cells, n_seeds = values.shape
    if is_there.all():
        centred = values - values.mean(axis=1, keepdims=True)
        return centred - centred.mean(axis=0), float((n_cells - 1) * (n_seeds - 1))
    rows, columns = np.nonzero(is_there)
    matrix = np.zeros((rows.size, n_cells + n_seeds))
    matrix[np.arange(rows.size), rows] = 1.0
    matrix[np.arange(rows.size), n_cells + columns] = 1.0
    fit, _, rank, _ = np.linalg.lstsq(matrix, values[is_there], rcond=None)
    residuals = np.zeros(values.shape)
    residuals[is_there] = values[is_there] - matrix @ fit
    return residuals, float(rows.size - rank)
