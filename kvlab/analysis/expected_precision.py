"""How precise a sweep will be, from its design alone: what `kvlab plan` says before anything runs.

The unit is the *spread*: the standard deviation over seeds of the trainings of one cell, taken as
equal in all cells. An effect is a weighted sum of trainings, so its standard error is the spread
times the root of the sum of squared weights over seeds. Its interval holds for all claims together
(Bonferroni). With looks the error is the claim's own. With a list of seeds it is pooled; reports
use the claim's own where it is larger, so their intervals are wider: by a quarter at three seeds,
an eighth at five. The levels of serving have a noise of their own, which no design knows.

Importing scipy's special functions would take a fifth of the time of a plan, so quantiles of
Student's t are computed here. The bounds of looks are exact at the first, and otherwise slightly
above those of `kvlab.analysis.sequential`, which are simulated.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from kvlab.analysis.effects import estimate_main_effects
from kvlab.analysis.matched_pairs import TOLERANCE, Factors
from kvlab.analysis.statistics import sum_squares
from kvlab.analysis.trial_rows import Levels, TrialRow

MAX_BOUND = 20.0
"""A look that calls nothing below this |t| decides nothing that is in doubt."""

MAX_SEEDS = 100
"""The most seeds that `DesignPrecision.count_seeds` tries."""

_MAX_DF = 200  # quantiles change by less than 1% above it


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
        lengths = {
            claim: math.sqrt(sum(w * w / self.seeds[key] for key, w in weights.items()))
            for claim, weights in self.weights.items()
        }
        if self.looks:
            bound = self.look_bounds()[self.looks[-1]]
        else:
            df = self._independent_claims() * (self.fewest_seeds - 1)
            bound = t_bound(self.alpha / self.claims, int(df + TOLERANCE))
        return {claim: bound * length for claim, length in lengths.items()}

    def smallest_error(self) -> float:
        """Return the least standard error of a claim at one seed, in spreads; 0 without one."""
        return min((math.hypot(*own.values()) for own in self.weights.values()), default=0.0)

    def _independent_claims(self) -> float:
        """Return of how many independent claims the pooled error is: Satterthwaite's number."""
        lengths = {name: math.hypot(*own.values()) for name, own in self.weights.items()}
        cosines = (
            sum(weight * theirs.get(key, 0.0) for key, weight in ours.items())
            / (lengths[one] * lengths[other])
            for one, ours in self.weights.items()
            for other, theirs in self.weights.items()
        )
        return len(lengths) ** 2 / sum(cosine * cosine for cosine in cosines)

    def look_bounds(self) -> dict[int, float]:
        """Return the |t| at which each look calls one of the claims, by its number of seeds.

        A look has the error that is spent since the look before it.
        """
        alpha, bounds, before = self.alpha / self.claims, {}, 0.0
        z = NormalDist().inv_cdf(1 - alpha / 2)
        for size in self.looks:
            spent = math.erfc(z / math.sqrt(2 * size / self.looks[-1]))
            bounds[size], before = t_bound(spent - before, size - 1), spent
        return bounds

    def find_vain_looks(self) -> dict[int, float]:
        """Return the looks before the last that decide nothing, with their bounds."""
        bounds = list(self.look_bounds().items())
        return {size: bound for size, bound in bounds[:-1] if bound > MAX_BOUND}

    def propose_looks(self) -> tuple[int, ...]:
        """Return looks with the same last one, the first of which can decide; empty if none can."""
        for first in range(self.looks[0], self.looks[-1]):
            looks = (first, *(size for size in self.looks if size > first))
            if not self.with_seeds(looks[-1], looks).find_vain_looks():
                return looks
        return ()

    def count_seeds(self, half_width: float) -> int | None:
        """Return the seeds, of the last look if there are any, that give such intervals.

        Args:
            half_width: The most that half an interval may be, in spreads.

        Returns:
            None if more than `MAX_SEEDS` do.
        """
        for count in range(2, MAX_SEEDS + 1):
            looks = (*(size for size in self.looks[:-1] if size < count), count)
            one = self.with_seeds(count, looks if self.looks else ())
            if max(one.half_widths().values()) <= half_width:
                return count
        return None

    def with_seeds(self, count: int, looks: tuple[int, ...]) -> "DesignPrecision":
        """Return the same design with so many seeds of every training."""
        seeds = dict.fromkeys(self.seeds, count)
        return DesignPrecision(self.claims, self.weights, self.alpha, seeds, looks)


def weigh_trainings(
    trainings: Mapping[Levels, str], factors: Factors, claims: Collection[str], metric: str
) -> dict[str, dict[Levels, float]]:
    """Return the weights of trainings in every claim that changes training.

    They are those that `kvlab.analysis.effects` will use if no trial fails.

    Args:
        trainings: The training of every cell at one seed.
        factors: Factor -> levels, the baseline's first.
        claims: As ``factor=level``.
        metric: What is decided.

    Returns:
        By claim; trainings are named by their first cell.
    """
    first: dict[str, Levels] = {}
    for levels, training in trainings.items():
        first.setdefault(training, levels)
    cells = {
        levels: {0: TrialRow(levels, 0, "", "done", training, {metric: 0.0})}
        for levels, training in trainings.items()
    }
    found: dict[str, dict[Levels, float]] = {}
    for effect in estimate_main_effects(cells, factors, metric, claims=claims):
        own: dict[Levels, float] = {}
        for levels, weight in effect.weights.items():
            key = first[trainings[levels]]
            own[key] = own.get(key, 0.0) + weight
        kept = {key: weight for key, weight in own.items() if abs(weight) > TOLERANCE}
        if effect.is_claimed and kept:
            found[effect.name] = kept
    return found


def pool_spread(groups: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """Return the pooled standard deviation of groups of values, and the number of values.

    None if no group has two values that differ.
    """
    groups = [group for group in groups if len(group) > 1]
    squares = math.fsum(sum_squares(one, math.fsum(one) / len(one)) for one in groups)
    count = sum(map(len, groups))
    return (math.sqrt(squares / (count - len(groups))), count) if squares else None


@lru_cache(maxsize=4096)
def t_bound(alpha: float, df: int) -> float:
    """Return the |t| that is exceeded with probability ``alpha``, by bisection; at most 10,000."""
    low, high = 0.0, 10_000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, min(df, _MAX_DF)) > alpha else (low, middle)
    return high


def _tail(t: float, df: int) -> float:
    """Return P(|T| > t) for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(df))
    is_odd = df % 2
    total, term = 0.0, math.cos(angle) if is_odd else 1.0
    for k in range(1, df // 2 + 1):
        total += term
        term *= math.cos(angle) ** 2 * (2 * k - 1 + is_odd) / (2 * k + is_odd)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if is_odd else inside)
