"""Repeated times of one thing: quantiles with intervals, and whether two of them differ.

R rounds of N samples each. Samples of one round share the state that the machine is in, so
intervals resample rounds, not samples (a cluster bootstrap), and two variants are compared
round by round.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvlab.benchmark.measurement import RATIO_PRECISION, Quantile

QUANTILES = (0.5, 0.95, 0.99)
CONFIDENCE = 0.99
"""Of a comparison. Since rounds go on until its interval is narrow, and not until it excludes
equality, about two calls in a hundred of two equal variants say that they differ, at most."""

POWER = 0.95
"""How often the smallest difference that a comparison says it could find is found."""

DECISIVE_RATIO = 3.0
"""A difference this many times what its interval reaches needs no narrower interval."""

TRIMMED_SHARE = 0.1
"""Share of a comparison's rounds that are trimmed at either end."""

MIN_ROUNDS = 4
"""Fewer rounds than this cannot tell two variants apart."""

_MAX_RESAMPLED = 2_000_000
"""Numbers drawn for one interval at most."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TimingSamples:
    """Times in seconds, (R, N)."""

    rounds: Floats

    @classmethod
    def of(cls, rounds: list[list[float]]) -> "TimingSamples":
        return cls(np.array(rounds, dtype=np.float64))

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def totals(self) -> "TimingSamples":
        """The sum of each round, (R, 1)."""
        return TimingSamples(self.rounds.sum(axis=1, keepdims=True))

    def quantile(self, q: float) -> Quantile:
        low, high = self._interval(q)
        return Quantile(q=q, value=float(np.quantile(self.rounds, q)), low=low, high=high)

    def quantiles(self) -> list[Quantile]:
        """p50, p95 and p99."""
        return [self.quantile(q) for q in QUANTILES]

    @property
    def relative_error(self) -> float:
        """Half of the median's 95% interval as a share of it; infinite after one round."""
        if len(self.rounds) < 2:
            return math.inf
        low, high = self._interval(0.5)
        return (high - low) / 2 / self.median if self.median > 0 else math.inf

    def _interval(self, q: float) -> tuple[float, float]:
        """The 95% interval of a quantile: always the same for the same samples."""
        count, size = self.rounds.shape
        resamples = max(50, min(1000, _MAX_RESAMPLED // (count * size)))
        picked = np.random.default_rng(0).integers(count, size=(resamples, count))
        drawn = np.quantile(self.rounds[picked], q, axis=(1, 2))
        low, high = np.quantile(drawn, [0.025, 0.975])
        return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """How long a variant takes as a multiple of another; ``low`` to ``high`` holds the truth
    with `CONFIDENCE`.

    ``least_found``: the smallest difference, as a share, that this many rounds this steady would
    have found in 95 of 100 cases.
    """

    ratio: float
    low: float
    high: float
    least_found: float

    @property
    def settled(self) -> bool:
        """Known to `RESOLVED`, or the difference is three times what the interval reaches."""
        reach = math.log(self.high / self.ratio)
        return (
            math.expm1(reach) <= RATIO_PRECISION
            or abs(math.log(self.ratio)) > DECISIVE_RATIO * reach
        )

    @property
    def verdict(self) -> Literal["same", "faster", "slower", "undecided"]:
        """``undecided``: the interval holds 1, and more than `RESOLVED` besides."""
        if self.low > 1.0:
            return "slower"
        if self.high < 1.0:
            return "faster"
        return "same" if self.settled else "undecided"


def compare_timings(mine: TimingSamples, base: TimingSamples) -> Comparison | None:
    """Compares two variants that took turns, by the ratios of their medians in each round.

    A machine that slows down slows both of a round, and cancels. The logarithms of the ratios
    get the interval of a trimmed mean (Tukey and McLaughlin, 1963), which is Student's where
    nothing is trimmed yet: a tenth at either end, where something else ran in one of the turns,
    is moved to the next value.

    Returns:
        None: there are fewer than `LEAST_ROUNDS` rounds.
    """
    count = min(len(mine.rounds), len(base.rounds))
    if count < MIN_ROUNDS:
        return None
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    ours, theirs = (np.median(each.rounds[:count], axis=1) for each in (mine, base))
    ratios = np.sort(np.log(ours) - np.log(theirs))
    cut = int(TRIMMED_SHARE * count)
    kept = count - 2 * cut
    middle = float(ratios[cut : count - cut].mean())
    spread = float(np.clip(ratios, ratios[cut], ratios[-1 - cut]).std(ddof=1))
    error = spread / (kept / count * math.sqrt(count))
    sure, likely = stdtrit(kept - 1, [(1 + CONFIDENCE) / 2, POWER])
    reach = float(sure) * error
    return Comparison(
        math.exp(middle),
        math.exp(middle - reach),
        math.exp(middle + reach),
        math.expm1(reach + float(likely) * error),
    )
