"""How precise a sweep will be, from its design alone: what `kvlab plan` says before anything runs.

The unit is the *spread*: the standard deviation over seeds of the trainings of one cell, taken as
equal in all cells. An effect is a weighted sum of trainings, so its standard error is the spread
times the root of the sum of squared weights over the seeds that they share. Its interval holds for
all claims together (Bonferroni). With looks the error is the claim's own. With a list of seeds it
is pooled as in a report of a sweep whose seeds explain nothing; reports use the claim's own where
it is larger. Where seeds explain much, intervals are narrower, and the report
says how much less differences spread. The levels of serving have a noise of their own, which no
design knows.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvlab.analysis.effects import estimate_main_effects
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.matched_pairs import name_trainings, sum_by_training
from kvlab.analysis.standard_errors import can_give_up_pairs
from kvlab.analysis.statistics import sum_squares, t_quantile
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.own_extensions import find_member

MAX_BOUND = 20.0
"""A look that calls nothing below this |t| decides nothing that is in doubt."""

MAX_SEEDS = 100
"""The most seeds that `DesignPrecision.count_seeds` tries."""

_LARGEST_BOUND = 10_000.0  # a larger |t| is as far out of reach


@dataclass(frozen=True)
class DesignPrecision:
    """What the claims of a design can show.

    Attributes:
        claims: Number of claims that are tested together.
        weights: Of every claim that changes training, the weight of each training.
        alpha: Probability of any wrong claim.
        seeds: Number of seeds of each training; with looks, at the last.
        looks: Number of seeds at each look; empty for a list of seeds.
    """

    claims: int
    weights: Mapping[str, Mapping[Levels, float]]
    alpha: float
    seeds: Mapping[Levels, int]
    looks: tuple[int, ...] = ()

    @property
    def fewest_seeds(self) -> int:
        return min(self.seeds.values())

    def half_widths(self) -> dict[str, float]:
        """Return half the width of each claim's interval, in spreads; none of one seed."""
        if not self.weights or self.fewest_seeds < 2:
            return {}
        weights = list(self.weights.values())
        if not self.looks and can_give_up_pairs(weights):
            seeds = [{key: self.seeds[key] for key in own} for own in weights]
        else:  # pairs need seeds that both have
            seeds = [dict.fromkeys(own, min(self.seeds[key] for key in own)) for own in weights]
        lengths = {
            claim: math.sqrt(math.fsum(w * w / count[key] for key, w in own.items()))
            for (claim, own), count in zip(self.weights.items(), seeds, strict=True)
        }
        if self.looks:
            bound = self.look_bounds()[self.looks[-1]]
        else:
            bound = t_quantile(1 - self.alpha / self.claims / 2, self._degrees_of_freedom())
        return {claim: bound * length for claim, length in lengths.items()}

    def _degrees_of_freedom(self) -> float:
        """Return those of the pooled error, for trainings of equal spread: Satterthwaite's."""
        units = [
            {key: weight / math.hypot(*own.values()) for key, weight in own.items()}
            for own in self.weights.values()
        ]
        if not can_give_up_pairs(units):
            cosines = (
                sum(weight * theirs.get(key, 0.0) for key, weight in ours.items())
                for ours, theirs in product(units, repeat=2)
            )
            return len(units) ** 2 / sum(one * one for one in cosines) * (self.fewest_seeds - 1)
        shares: dict[Levels, float] = {}
        for key, weight in (item for own in units for item in own.items()):
            shares[key] = shares.get(key, 0.0) + weight**2
        parts = (share**2 / (self.seeds[key] - 1) for key, share in shares.items())
        return len(units) ** 2 / sum(parts)

    def look_bounds(self) -> dict[int, float]:
        """Return the |t| at which each look calls one of the claims, by its number of seeds."""
        if not self.looks:
            return {}
        reached = [min(bound, _LARGEST_BOUND) for bound in self._find_bounds(self.looks)]
        return dict(zip(self.looks, reached, strict=True))

    def _find_bounds(self, looks: tuple[int, ...]) -> Sequence[float]:
        find: Callable[..., Sequence[float]] = find_member("looks", "bounds")
        return find(looks, self.looks[-1], self.alpha / self.claims)

    def find_vain_looks(self) -> dict[int, float]:
        """Return the looks before the last that decide nothing, with their bounds."""
        bounds = list(self.look_bounds().items())
        return {size: bound for size, bound in bounds[:-1] if bound > MAX_BOUND}

    def propose_looks(self) -> tuple[int, ...]:
        """Return looks with the same last one, the first of which can decide; empty if none can."""
        for first in range(self.looks[0], self.looks[-1]):
            (bound,) = self._find_bounds((first,))
            if bound <= MAX_BOUND:
                return (first, *(size for size in self.looks if size > first))
        return ()

    def count_seeds(self, half_width: float) -> int | None:
        """Return the seeds, of the last look if there are any, that give such intervals.

        Args:
            half_width: The most that half an interval may be, in spreads.

        Returns:
            None if more than `MAX_SEEDS` do.
        """

        def is_enough(count: int) -> bool:
            looks = (*(size for size in self.looks[:-1] if size < count), count)
            one = self.with_seeds(count, looks if self.looks else ())
            return max(one.half_widths().values()) <= half_width

        if not is_enough(MAX_SEEDS):
            return None
        return bisect_left(range(MAX_SEEDS), True, lo=2, key=is_enough)

    def with_seeds(self, count: int, looks: tuple[int, ...]) -> "DesignPrecision":
        """Return the same design with so many seeds of every training."""
        return replace(self, seeds=dict.fromkeys(self.seeds, count), looks=looks)


def weigh_trainings(
    trainings: Mapping[Levels, str], estimand: Estimand, claims: Collection[str], metric: str
) -> dict[str, dict[Levels, float]]:
    """Return the weights of trainings in every claim that changes training.

    They are those that `kvlab.analysis.effects` will use if no trial fails.

    Args:
        trainings: The training of every cell at one seed.
        estimand: The factors, and which settings an effect is the mean over.

    Returns:
        By claim; trainings are named by their first cell.
    """
    cells = {
        levels: {0: TrialRow(levels, 0, "", "done", training, {metric: 0.0})}
        for levels, training in trainings.items()
    }
    names = name_trainings(cells)
    effects = estimate_main_effects(cells, estimand, metric, claims=claims)
    weights = {one.name: sum_by_training(one.weights, names) for one in effects if one.is_claimed}
    return {name: own for name, own in weights.items() if own}


def pool_spread(groups: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """Return the pooled standard deviation of groups of values, and the number of values.

    None if no group has two values that differ.
    """
    groups = [group for group in groups if len(group) > 1]
    squares = math.fsum(sum_squares(one, math.fsum(one) / len(one)) for one in groups)
    count = sum(map(len, groups))
    return (math.sqrt(squares / (count - len(groups))), count) if squares else None
