"""Serving gaps: the loss through the serving cache minus the one-shot loss of the same weights.

A gap is measured on one training's weights, so the training is the unit, and every cell has an
error of its own: caches differ in their spread by orders of magnitude. Intervals hold for all cells
together (`kvlab.analysis.verdicts`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.statistics import estimate
from kvlab.analysis.verdicts import judge_family


@dataclass(frozen=True)
class ServingGap:
    """A cell's serving gap over its trainings.

    Attributes:
        value: The mean, in nats per token.
        smallest: The smallest gap of a training.
        largest: The largest one.
        trainings: Number of trainings.
        interval: Ends of the simultaneous interval; None if the gap was not tested.
        p: Two-sided p-value, corrected for all cells; 1 if the gap was not tested.
    """

    value: float
    smallest: float
    largest: float
    trainings: int
    interval: tuple[float, float] | None = None
    p: float = 1.0

    @property
    def is_found(self) -> bool:
        """Whether the gap is shown not to be zero."""
        return self.interval is not None and not self.interval[0] < 0 < self.interval[1]


def judge_gaps(
    rows: Sequence[Mapping[int, float]], alpha: float, rounding: float
) -> list[ServingGap]:
    """Test the gaps of several cells together.

    Args:
        rows: Gaps by seed, at least one for each cell.
        alpha: Probability of any false claim.
        rounding: Size of a gap that is rounding. A cell without a larger one is not tested.
    """
    estimates = [estimate(list(row.values())) for row in rows]
    tested = [
        number
        for number, one in enumerate(estimates)
        if one.kind == "tested" and max(map(abs, rows[number].values())) >= rounding
    ]
    errors = [StandardError(estimates[n].standard_error, estimates[n].df) for n in tested]
    tests = judge_family([estimates[n].value for n in tested], errors, alpha)
    gaps = []
    for row in rows:
        values = list(row.values())
        mean = math.fsum(values) / len(values)
        gaps.append(ServingGap(mean, min(values), max(values), len(values)))
    for number, test in zip(tested, tests, strict=True):
        gaps[number] = replace(gaps[number], interval=(test.low, test.high), p=test.p)
    return gaps
