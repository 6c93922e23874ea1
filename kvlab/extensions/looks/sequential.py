"""Group-sequential paired t-tests: looks at a sweep while it gets seeds, with one family error.

A null hypothesis that is tested anew after every few seeds is rejected in 15 to 21% of sweeps that
have no effect. So the looks are declared beforehand, and each spends a part of the error: after n
of N seeds 2 - 2 Phi(z / sqrt(n / N)) with z the quantile at 1 - alpha / 2 (Lan and DeMets 1983, in
the form of O'Brien and Fleming 1979), little at first and all of it at the last. A *bound* is the
|t| at which a look rejects: of the t statistic, not of its normal limit, which at 3 seeds is far
off.

Several claims are tested by Holm's method in its group-sequential form (Ye et al. 2013, Maurer and
Bretz 2013; Tamhane, Xi and Gou 2021, doi:10.1002/sim.9128): what is rejected passes its error on to
the claims that are left, at this look and all later ones. A *repeated interval* (Jennison and
Turnbull 1989) is the estimate plus and minus the bound of Bonferroni's level times the standard
error: those of all claims and looks cover the truth together with probability 1 - alpha. A claim
that only Holm's step decides has an interval that is cut at zero. With a margin, a claim whose
interval lies inside it is equivalent (two one-sided tests).

The spread of the claim's own differences is used. The looks may end early for any reason that is
not the data, and a claim may be given up (futility): neither adds to the error.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvlab.analysis.statistics import estimate, t_cdf, t_quantile
from kvlab.analysis.verdicts import DIFFERENT, VERDICTS, judge_interval

SAMPLES = 40_000
"""Null samples of a bound. The level of a look is exact to 0.3% of itself."""

_LEVELS = (1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 0.9)
"""Levels between which `repeated_p_value` interpolates."""

FUTILE_POWER = 0.02
"""A claim is given up if it would be decided at the last look with less than this probability."""


def spent_alpha(fraction: float, alpha: float) -> float:
    """Return the error that may be spent when a fraction of the seeds is there; above 0."""
    from scipy.special import ndtr, ndtri  # type: ignore[import-untyped]

    return max(1e-200, 2 * float(ndtr(ndtri(alpha / 2) / math.sqrt(fraction))))


@lru_cache(maxsize=100_000)
def t_bounds(sizes: tuple[int, ...], maximum: int, alpha: float) -> tuple[float, ...]:
    """Return the bound on |t| at every look.

    With the look's p-value drawn evenly and given, the directions of its differences from their
    mean are even on a sphere, whatever the spread: so the earlier looks can be simulated backward
    from it. That gives the share of samples, by p-value, that no earlier look has rejected, with
    equal relative precision at any level. The draws are always the same.

    Args:
        sizes: Number of seeds at each look so far, increasing, from 2.
        maximum: Number of seeds at the last look, at which all of alpha is spent.
        alpha: Two-sided level of this test over all looks.
    """
    from scipy.special import stdtrit

    first = -t_quantile(spent_alpha(sizes[0] / maximum, alpha) / 2, sizes[0] - 1)
    bounds = [first]
    for count in range(2, len(sizes) + 1):
        spent = spent_alpha(sizes[count - 1] / maximum, alpha)
        increment = spent - spent_alpha(sizes[count - 2] / maximum, alpha)
        p_values = (np.arange(SAMPLES) + 0.5) * (spent / SAMPLES)
        statistics = -stdtrit(sizes[count - 1] - 1, p_values / 2)
        # a sample is open if the t statistic of no earlier look has reached its bound
        is_open, (sums, squares) = np.ones(SAMPLES, bool), _centred_sums(sizes[:count])
        for size, bound, total, of_squares in zip(sizes, bounds, sums, squares, strict=False):
            mean = statistics / math.sqrt(sizes[count - 1]) + total / size
            variance = (of_squares - total**2 / size) / (size - 1)
            is_open &= np.abs(mean * math.sqrt(size) / np.sqrt(variance)) < bound
        rejected = np.cumsum(is_open) * (spent / SAMPLES)
        p_value = float(np.interp(increment, rejected, p_values + spent / SAMPLES / 2))
        bounds.append(-t_quantile(p_value / 2, sizes[count - 1] - 1))
    return tuple(bounds)


def spent_share(looks: Sequence[int], seeds: int, alpha: float) -> float:
    """Return the part of a test's level that may be spent on a comparison at its last look.

    A claim has the bound of `t_bounds`. What is compared beside the claims is tested at the level
    of that bound, whatever its standard error is made from.

    Args:
        looks: Number of seeds at each declared look.
        seeds: Number of seeds that the comparison has.
        alpha: Two-sided level over all looks.
    """
    if seeds < 2 or seeds > looks[-1]:
        return 1.0
    sizes = (*(size for size in looks if 1 < size < seeds), seeds)
    bound = t_bounds(sizes, looks[-1], alpha)[-1]
    return min(1.0, 2 * t_cdf(-bound, seeds - 1) / alpha)


@lru_cache(maxsize=32)
def _centred_sums(sizes: tuple[int, ...]) -> tuple["NDArray[np.float64]", "NDArray[np.float64]"]:
    """Return sums and sums of squares over the seeds of each look but the last, one row a look.

    The samples have mean 0 and variance 1 over all seeds of the last look.
    """
    last = sizes[-1]
    values = np.random.default_rng(last).standard_normal((last, SAMPLES))
    values -= values.mean(axis=0)
    values /= np.sqrt((values**2).sum(axis=0) / (last - 1))
    rows = [size - 1 for size in sizes[:-1]]
    return values.cumsum(axis=0)[rows], (values**2).cumsum(axis=0)[rows]


@dataclass(frozen=True)
class ClaimState:
    """A claim after a look.

    Attributes:
        sizes: Number of seeds at each of its looks so far. A look without new seeds is none.
        value: Mean difference at the last of them.
        error: Its standard error, from the claim's own differences.
        level: Two-sided level of the claim at that look, over all looks: Holm's step.
        bound: The |t| at which that look rejects at this level.
        low, high: Repeated interval.
        outcome: Name of its verdict, empty as long as it is undecided. A decision is final.
        is_open: Whether more seeds are worth their price: undecided, and not futile.
    """

    sizes: tuple[int, ...] = ()
    value: float = 0.0
    error: float = 0.0
    level: float = 0.0
    bound: float = math.inf
    low: float = -math.inf
    high: float = math.inf
    outcome: str = ""
    is_open: bool = True

    @property
    def statistic(self) -> float:
        """The t statistic; infinite if all differences are equal and not zero."""
        if self.error > 0:
            return self.value / self.error
        return math.copysign(math.inf, self.value) if self.value else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, infinite ones as null."""
        fields = {**vars(self), "sizes": list(self.sizes)}
        return {key: None if one in (math.inf, -math.inf) else one for key, one in fields.items()}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ClaimState":
        """Return what `to_json` has written."""
        known = {key: value for key, value in fields.items() if value is not None}
        return cls(**{**known, "sizes": tuple(fields["sizes"])})


@dataclass(frozen=True)
class Looks:
    """Looks at one family of claims, as they were declared.

    Attributes:
        sizes: Number of seeds at each look, increasing.
        claims: Number of claims in the family.
        alpha: Probability of any wrong claim, over all claims and looks.
        margin: A cost below it does not matter; None if every difference does.
    """

    sizes: tuple[int, ...]
    claims: int
    alpha: float = 0.05
    margin: float | None = None
    better: Literal["lower", "higher", "neither"] = "lower"

    def take(
        self,
        states: Mapping[str, ClaimState],
        differences: Mapping[str, Sequence[float]],
        allowed: Mapping[str, Collection[str]] = MappingProxyType({}),
        least_errors: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, ClaimState]:
        """Return the claims after one more look.

        Args:
            states: Every claim before the look; at the first, `ClaimState()`.
            differences: Of each claim, the differences at all its seeds so far. Without a new seed,
                or with fewer than two, a claim is not tested; without any it is given up.
            allowed: Verdicts that a claim may have, where trials diverged and those that are left
                flatter one side. A claim that would have another is given up. Others may have all.
            least_errors: Standard errors of claims that are no smaller, see `share_variance`.
        """
        assert len(states) == self.claims, "a look is at the whole family"
        new = {
            name: self._observe(state, differences[name], least_errors.get(name, 0.0))
            for name, state in states.items()
        }
        looked = [name for name in new if new[name].sizes != states[name].sizes]
        has_decided = True
        while has_decided:  # what is decided passes its error on to the others
            level, has_decided = self._level(new.values()), False
            for name in looked:
                if not new[name].outcome:
                    new[name] = self._test(new[name], level)
                    if new[name].outcome not in ("", *allowed.get(name, VERDICTS)):
                        new[name] = replace(new[name], outcome="", is_open=False)
                    has_decided |= bool(new[name].outcome)
        return new

    def _observe(
        self, state: ClaimState, differences: Sequence[float], least_error: float
    ) -> ClaimState:
        """Estimate a claim that has new seeds."""
        count = len(differences)
        if state.outcome or count <= max(state.sizes, default=0):
            return replace(state, is_open=state.is_open and count > 0)
        if count < 2:
            return state
        found = estimate(differences, max(map(abs, differences)), least_error=least_error)
        mean, error, sizes = found.value, found.standard_error, (*state.sizes, count)
        reach = self._bound(sizes, self.alpha / self.claims) * error if error else 0.0
        state = ClaimState(sizes, mean, error, low=mean - reach, high=mean + reach)
        return state if mean or error else replace(state, outcome="identical", is_open=False)

    def _test(self, state: ClaimState, level: float) -> ClaimState:
        """Decide a claim at its present level, or say whether it is worth more seeds."""
        state = replace(state, level=level, bound=self._bound(state.sizes, level))
        if abs(state.statistic) >= state.bound:
            # what Holm's step adds to Bonferroni's is only that the difference is not zero
            if state.value > 0:
                state = replace(state, low=max(0.0, state.low))
            else:
                state = replace(state, high=min(0.0, state.high))
        name = judge_interval(state.low, state.high, self.better, self.margin)
        if VERDICTS[name].concludes:
            return replace(state, outcome=name, is_open=False)
        is_last = state.sizes[-1] >= self.sizes[-1]
        return replace(state, is_open=not is_last and not self._is_futile(state))

    def _level(self, states: Iterable[ClaimState]) -> float:
        """Return the level of each claim that is left: Holm's step.

        A difference that is found passes its error on. With a margin it keeps that of one one-sided
        test, which could have called it small, unless it is small or none of a cost. What is called
        small could have been called different, so it keeps all.
        """
        outcomes = [state.outcome for state in states]
        found = [name for name in outcomes if name in DIFFERENT]
        kept = [name for name in found if name not in ("better", "worse within")]
        reserve = len(kept) / 2 / self.claims if self.margin is not None else 0.0
        return self.alpha * (1 - reserve) / max(1, self.claims - len(found))

    def _bound(self, sizes: tuple[int, ...], level: float) -> float:
        return t_bounds(sizes, self.sizes[-1], level)[-1]

    def _is_futile(self, state: ClaimState) -> bool:
        """Return whether a decision at the last look is unlikely, by the predictive power.

        The power is averaged over what the differences so far say of the true one (Spiegelhalter,
        Freedman and Blackburn 1986), with their spread taken as the true spread. So it is asked
        only when at least half of the seeds are there.
        """
        from scipy.special import ndtr

        count, maximum = state.sizes[-1], self.sizes[-1]
        if 2 * count < maximum:
            return False
        sizes = (*state.sizes, *(size for size in self.sizes if size > count))
        expected = state.statistic * math.sqrt(maximum / count)
        spread = math.sqrt((maximum - count) / count)
        bound = self._bound(sizes, state.level)
        power = ndtr((expected - bound) / spread) + ndtr((-expected - bound) / spread)
        if self.margin is not None:
            error = state.error * math.sqrt(count / maximum)  # as it will be at the last look
            room = self.margin / error - self._bound(sizes, self.alpha / self.claims)
            cost = -expected if self.better == "higher" else expected
            power += ndtr((room - cost) / spread)
            if self.better == "neither":
                power -= ndtr((-room - cost) / spread)
        return bool(power < FUTILE_POWER)


def repeated_p_value(state: ClaimState, maximum: int) -> float:
    """Return the smallest level at which a claim, tested alone, would be called at its look.

    Interpolated between levels, in the logarithm of the level and of the look's own p-value.
    """
    if not state.error:
        return 0.0 if state.value else 1.0
    df = state.sizes[-1] - 1
    bounds = [t_bounds(state.sizes, maximum, level)[-1] for level in _LEVELS]
    nominal = [t_cdf(-bound, df) for bound in bounds]
    own = t_cdf(-abs(state.statistic), df)
    if own >= nominal[-1]:
        return 1.0
    return float(np.exp(np.interp(np.log(own), np.log(nominal), np.log(_LEVELS))))


def repeated_test_error(sizes: Sequence[int], alpha: float = 0.05) -> float:
    """Return how often a true null hypothesis is rejected if every look tests at the same level.

    Args:
        sizes: Number of seeds at each look, increasing, from 2.
        alpha: Level at which a t-test rejects at each look.
    """
    values = np.random.default_rng(0).standard_normal((sizes[-1], SAMPLES))
    sums, squares = values.cumsum(axis=0), (values**2).cumsum(axis=0)
    is_rejected = np.zeros(SAMPLES, dtype=bool)
    for size in sizes:
        total = sums[size - 1]
        error = np.sqrt((squares[size - 1] - total**2 / size) / (size - 1) / size)
        is_rejected |= np.abs(total / size / error) >= t_quantile(1 - alpha / 2, size - 1)
    return float(is_rejected.mean())
