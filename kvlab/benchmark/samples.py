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

from kvlab.benchmark.measurement import Quantile

QUANTILES = (0.5, 0.95, 0.99)
CONFIDENCE = 0.99
"""Of a comparison: at most one call in a hundred of two equal variants says that they differ."""

LEAST_ROUNDS = 4
"""Fewer rounds than this cannot tell two variants apart."""

_RESAMPLED = 2_000_000
"""Numbers drawn for one interval at most."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Samples:
    """Times in seconds, (R, N)."""

    rounds: Floats

    @classmethod
    def of(cls, rounds: list[list[float]]) -> "Samples":
        return cls(np.array(rounds, dtype=np.float64))

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def totals(self) -> "Samples":
        """The sum of each round, (R, 1)."""
        return Samples(self.rounds.sum(axis=1, keepdims=True))

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
        resamples = max(50, min(1000, _RESAMPLED // (count * size)))
        picked = np.random.default_rng(0).integers(count, size=(resamples, count))
        drawn = np.quantile(self.rounds[picked], q, axis=(1, 2))
        low, high = np.quantile(drawn, [0.025, 0.975])
        return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """How long a variant takes as a multiple of another; ``low`` to ``high`` holds the truth
    with `CONFIDENCE`."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> Literal["same", "faster", "slower"]:
        if self.low > 1.0:
            return "slower"
        return "faster" if self.high < 1.0 else "same"


def compare(mine: Samples, base: Samples) -> Comparison | None:
    """Compares two variants that took turns, by the ratios of their medians in each round.

    The logarithms of these ratios get Student's interval: a machine that slows down slows both
    of a round, and cancels.

    Returns:
        None: there are fewer than `LEAST_ROUNDS` rounds.
    """
    count = min(len(mine.rounds), len(base.rounds))
    if count < LEAST_ROUNDS:
        return None
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    ours, theirs = (np.median(each.rounds[:count], axis=1) for each in (mine, base))
    ratios = np.log(ours) - np.log(theirs)
    middle, spread = float(ratios.mean()), float(ratios.std(ddof=1))
    reach = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * spread / math.sqrt(count)
    return Comparison(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))
