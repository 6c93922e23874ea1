"""Rank cells, and say which cannot be told apart from the best.

Cells are ranked by the baseline's mean plus their paired difference from it, over the seeds that
both have: means over unequal seeds would rank the seeds. A cell that shares no seed with the
baseline has no rank.

The standard error of a difference is that of the effects: the larger of its own and the one pooled
over the differences of all cells from the baseline (`kvlab.analysis.standard_errors`). Cells that
share trained weights, and cells that are served otherwise than they were trained, keep their own.

*Against the best* (Hsu 1984, Edwards and Hsu 1983): every cell in turn is the one that all others
are compared with, and is out if one of them beats it. With 95% probability the true best cell is
among those that are left, which bounds what a choice among them can lose.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

from kvlab.analysis.matched_pairs import group_by_training
from kvlab.analysis.standard_errors import PooledVariance, pool_variance
from kvlab.analysis.statistics import Estimate, estimate, sum_squares, t_cdf, t_quantile, tested
from kvlab.analysis.trial_rows import Levels


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
        self._sign, self._baseline = -1.0 if higher_is_better else 1.0, baseline
        self._losses = {
            levels: {seed: self._sign * by_seed[seed] for seed in sorted(by_seed)}
            for levels, by_seed in values.items()
            if by_seed
        }
        self.cells = tuple(self._losses)
        groups = group_by_training([trainings.get(levels, ()) for levels in self.cells])
        self._groups = dict(zip(self.cells, groups.tolist(), strict=True))
        self._scale = max(
            (abs(v) for row in self._losses.values() for v in row.values()), default=0.0
        )
        self._noisy, self._in_steps, self._alpha = frozenset(noisy), in_steps, alpha
        self._all_seeds, self._item_variances = all_seeds, item_variances
        self._compare = cache(self._estimate)

    @property
    def _anchor(self) -> Levels:
        """The baseline, or the cell with most seeds if the baseline has none."""
        counts = {levels: len(by_seed) for levels, by_seed in self._losses.items()}
        return self._baseline if self._baseline in counts else max(counts, key=counts.__getitem__)

    def _shared_seeds(self, one: Levels, other: Levels) -> list[int]:
        return [seed for seed in self._losses[one] if seed in self._losses[other]]

    @cached_property
    def means(self) -> dict[Levels, float]:
        """The mean of every cell, as if it had the seeds of the baseline."""
        if not self.cells:
            return {}
        anchor = self._anchor
        own = self._losses[anchor].values()
        mean = math.fsum(own) / len(own)
        found = {one: self._compare(one, anchor) for one in self.cells if one != anchor}
        losses = {anchor: mean} | {one: mean + d.value for one, d in found.items() if d is not None}
        return {levels: self._sign * losses[levels] for levels in self.cells if levels in losses}

    def best_first(self, cells: Iterable[Levels]) -> list[Levels]:
        """Sort cells that have a mean, the best first; ties in the order of the design."""
        chosen = set(cells)
        ranked = [levels for levels in self.cells if levels in chosen and levels in self.means]
        return sorted(ranked, key=lambda levels: self._sign * self.means[levels])

    def difference(self, one: Levels, other: Levels) -> Estimate | None:
        """Estimate ``one`` minus ``other``, with the 95% interval of this difference alone.

        Returns:
            None if the two share no seed.
        """
        return self._compare(one, other) if self._sign > 0 else self._compare(other, one)

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
        bounds = {one: self._lower_bounds(one, ranked, self._alpha / choices) for one in ranked}
        left = [one for one in ranked if all(bound <= 0 for bound in bounds[one].values())]
        first, *rivals = left or ranked
        most = max([0.0, *(-bounds[rival][first] for rival in rivals)])
        if self._item_variances is not None:
            most = min(most, 1.0)  # shares cannot differ by more
        return Best(first, tuple(rivals), None if math.isinf(most) else most)

    def _lower_bounds(
        self, one: Levels, cells: Iterable[Levels], alpha: float
    ) -> dict[Levels, float]:
        """Return lower bounds of how much worse a cell is than each other one, together."""
        found = {other: self._compare(one, other) for other in cells if other != one}
        n_tested = sum(each is not None and each.kind == "tested" for each in found.values())
        bounds = dict.fromkeys(found, -math.inf)  # as where there is one seed
        for other, each in found.items():
            if each is not None and each.kind == "tested":
                reach = t_quantile(1 - alpha / n_tested, each.df) * each.standard_error
                bounds[other] = each.value - reach
            elif each is not None and each.kind in ("exact", "identical"):
                has_several = len(self._shared_seeds(one, other)) > 1
                bounds[other] = each.value if has_several else -math.inf
        return bounds

    def told_apart(self, one: Levels, other: Levels) -> bool:
        """Whether ``one`` is better than ``other``, where any of all cells may have been picked."""
        found = self._compare(one, other)
        if found is None or found.kind != "tested":
            return found is not None and found.kind == "exact" and found.value < 0
        return t_cdf(found.value / found.standard_error, found.df) < self._alpha / len(self.cells)

    def _estimate(self, one: Levels, other: Levels) -> Estimate | None:
        """Estimate the loss of one cell minus that of another, over the seeds that both have."""
        if one not in self._losses or other not in self._losses:
            return None
        seeds = self._shared_seeds(one, other)
        if not seeds:
            return None
        differences = [self._losses[one][seed] - self._losses[other][seed] for seed in seeds]
        mean, least = math.fsum(differences) / len(seeds), 0.0
        is_apart = self._groups[one] != self._groups[other]
        if self._item_variances is not None and (is_apart or abs(mean) > 1e-12 * self._scale):
            of_items = self._item_variances[one] + self._item_variances[other]
            least = math.sqrt(of_items / len(seeds))
        if self._pooled is None or len(seeds) < 2 or not is_apart or {one, other} & self._noisy:
            return estimate(differences, self._scale, in_steps=self._in_steps, least_error=least)
        own = sum_squares(differences, mean) / (len(seeds) - 1)
        error = self._pooled.error({one: 1.0, other: -1.0}, own, seeds)
        return tested(mean + error.shift, error.value, error.df)

    @cached_property
    def _pooled(self) -> PooledVariance[Levels] | None:
        """Pool the differences from the anchor of all cells that were trained apart from it."""
        if not self.cells or self._item_variances is not None or self._anchor in self._noisy:
            return None
        anchor, firsts = self._anchor, dict[int, Levels]()
        for levels, group in self._groups.items():
            firsts.setdefault(group, levels)
        compared = [c for c in firsts.values() if self._groups[c] != self._groups[anchor]]
        compared = [c for c in compared if c not in self._noisy]
        seeds = {c: self._shared_seeds(c, anchor) for c in compared}
        differences = [
            {seed: self._losses[c][seed] - self._losses[anchor][seed] for seed in seeds[c]}
            for c in compared
            if len(seeds[c]) > 1
        ]
        if not differences:
            return None
        weights = [{c: 1.0, anchor: -1.0} for c in compared if len(seeds[c]) > 1]
        values = {c: row for c, row in self._losses.items() if c not in self._noisy}
        pooled = pool_variance(differences, weights, values, all_seeds=self._all_seeds)
        return pooled if pooled.variance > 0 else None
