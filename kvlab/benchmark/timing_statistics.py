"""Statistics of repeated timings: quantiles with intervals, and comparisons of two variants.

Shapes: R rounds of N samples each. Samples of one round share the state of the machine, so
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
"""Confidence level of a comparison. Rounds continue until its interval is narrow, not until it
excludes equality, so at most about two in a hundred comparisons of equal variants report a
difference."""

POWER = 0.95
"""Probability with which the smallest detectable difference of a comparison is detected."""

DECISIVE_RATIO = 3.0
"""A difference this many times the half-width of its interval needs no narrower interval."""

TRIMMED_SHARE = 0.1
"""Share of a comparison's rounds that is trimmed at either end."""

MIN_ROUNDS = 4
"""The fewest rounds from which two variants can be told apart."""

_MAX_RESAMPLED = 2_000_000
"""Upper bound on the numbers drawn for one interval."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class TimingSamples:
    """Times in seconds, (R, N)."""

    rounds: Floats

    @property
    def median(self) -> float:
        return float(np.median(self.rounds))

    @property
    def totals(self) -> "TimingSamples":
        """The sum of each round, (R, 1)."""
        return TimingSamples(self.rounds.sum(axis=1, keepdims=True))

    def quantile(self, q: float) -> Quantile:
        """Return a quantile with its 95% interval."""
        low, high = self._interval(q)
        return Quantile(q=q, value=float(np.quantile(self.rounds, q)), low=low, high=high)

    def quantiles(self) -> list[Quantile]:
        """Return p50, p95 and p99."""
        return [self.quantile(q) for q in QUANTILES]

    @property
    def relative_error(self) -> float:
        """Half of the median's 95% interval as a share of it; infinite after one round."""
        if len(self.rounds) < 2:
            return math.inf
        low, high = self._interval(0.5)
        return (high - low) / 2 / self.median if self.median > 0 else math.inf

    def _interval(self, q: float) -> tuple[float, float]:
        """Return the 95% interval of a quantile. It is deterministic."""
        count, size = self.rounds.shape
        resamples = max(50, min(1000, _MAX_RESAMPLED // (count * size)))
        round_indices = np.random.default_rng(0).integers(count, size=(resamples, count))
        resampled = np.quantile(self.rounds[round_indices], q, axis=(1, 2))
        low, high = np.quantile(resampled, [0.025, 0.975])
        return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """The time of a variant as a multiple of the time of another.

    Attributes:
        ratio: the estimate.
        low, high: its interval with confidence `CONFIDENCE`.
        min_detectable: the smallest difference, as a share, that this many rounds with this
            spread detect in 95 of 100 cases.
    """

    ratio: float
    low: float
    high: float
    min_detectable: float

    @property
    def is_settled(self) -> bool:
        """Whether the interval is narrow, or the difference large beside it."""
        half_width = math.log(self.high / self.ratio)
        is_narrow = math.expm1(half_width) <= RATIO_PRECISION
        return is_narrow or abs(math.log(self.ratio)) > DECISIVE_RATIO * half_width

    @property
    def verdict(self) -> Literal["same", "faster", "slower", "undecided"]:
        """``undecided``: the interval contains 1 and is wider than `RATIO_PRECISION`."""
        if self.low > 1.0:
            return "slower"
        if self.high < 1.0:
            return "faster"
        return "same" if self.is_settled else "undecided"


def compare_timings(samples: TimingSamples, base: TimingSamples) -> Comparison | None:
    """Compare two variants that were run in turns, by the ratio of their medians per round.

    Whatever slows down the machine slows down both variants of a round, and cancels. The
    logarithms of the ratios get the interval of a trimmed mean (Tukey and McLaughlin, 1963),
    which is Student's where nothing is trimmed. Winsorizing a tenth at either end removes rounds
    in which something else ran during one of the turns.

    Returns:
        The comparison, or None for fewer than `MIN_ROUNDS` rounds, or on a machine without scipy.
    """
    count = min(len(samples.rounds), len(base.rounds))
    if count < MIN_ROUNDS:
        return None
    try:
        from scipy.special import stdtrit  # type: ignore[import-untyped]
    except ImportError:  # on a machine that only runs trials
        return None
    medians, base_medians = (np.median(s.rounds[:count], axis=1) for s in (samples, base))
    ratios = np.sort(np.log(medians) - np.log(base_medians))
    cut = int(TRIMMED_SHARE * count)
    untrimmed = count - 2 * cut
    mean = float(ratios[cut : count - cut].mean())
    spread = float(np.clip(ratios, ratios[cut], ratios[-1 - cut]).std(ddof=1))
    error = spread / (untrimmed / count * math.sqrt(count))
    confidence_t, power_t = stdtrit(untrimmed - 1, [(1 + CONFIDENCE) / 2, POWER])
    half_width = float(confidence_t) * error
    return Comparison(
        math.exp(mean),
        math.exp(mean - half_width),
        math.exp(mean + half_width),
        math.expm1(half_width + float(power_t) * error),
    )
