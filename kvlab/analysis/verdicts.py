"""Verdicts: what the differences of one table let a report say, and in which words.

Interval and verdict are one procedure. The *simultaneous intervals* contain all true differences
with probability 1 - alpha: t intervals by Bonferroni's correction. Whether a difference is not zero
is tested by Holm's method (1979), whose first step is the same interval; what only a later step
finds has an interval that is cut at zero, since nothing but the sign follows from it (Strassburger
and Bretz 2008). So a difference is claimed if and only if zero is not inside its interval. With a
*margin*, a level costs less than it if the interval's worse end does: a one-sided test at the level
of the family, of which two make an equivalence test (Schuirmann 1987). A difference that is found,
and could still be called cheap by mistake, keeps the error of that test, and passes on only the
rest; so any number of statements is wrong with probability alpha at most.
"""

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvlab.analysis.standard_errors import StandardError
from kvlab.analysis.statistics import t_cdf, t_quantile
from kvlab.store.metrics import METRICS

Tone = Literal["good", "bad", "muted", ""]


@dataclass(frozen=True)
class Verdict:
    """A member of the table of verdicts.

    Attributes:
        words: As printed; ``{margin}`` stands for the sweep's margin.
        concludes: Whether it decides something about the level.
    """

    words: str
    meaning: str
    tone: Tone = ""
    concludes: bool = False


_TABLE = tomllib.loads(Path(__file__).with_name("verdicts.toml").read_text(encoding="utf-8"))

VERDICTS = {name: Verdict(**facts) for name, facts in _TABLE.items()}
"""Every verdict on a level, by its name. Reports, comparisons and MLflow print the words."""

WORSE = ("worse", "worse within")
"""Verdicts by which a cost is shown."""

DIFFERENT = ("better", *WORSE, "higher", "lower")
"""Verdicts that call a difference."""

CHEAP = ("better", "bounded", "worse within", "identical", "equivalent")
"""Verdicts by which a cost is shown to be below the margin, or not to be there."""


def write_verdict(name: str, margin: float | None, metric: str) -> str:
    """Return the words of a verdict on a metric; empty without a name."""
    return VERDICTS[name].words.format(margin=METRICS[metric].write_margin(margin)) if name else ""


@dataclass(frozen=True)
class FamilyTest:
    """One difference of several that are judged together.

    Attributes:
        low: Lower end of the simultaneous interval; 0 where zero itself is excluded.
        high: Upper end; 0 where zero itself is excluded.
        p: Two-sided p-value, corrected for all of them by Holm's method.
    """

    low: float
    high: float
    p: float


def judge_family(
    values: Sequence[float],
    errors: Sequence[StandardError | None],
    alpha: float,
    margin: float | None = None,
    weights: Sequence[float] | None = None,
) -> list[FamilyTest]:
    """Return simultaneous intervals and corrected p-values.

    Args:
        errors: Their standard errors, above 0; None for one that is not tested, whose interval is
            its value.
        alpha: Probability of any wrong statement.
        margin: A cost that does not matter; None without one.
        weights: Each difference's part of ``alpha``, at most 1 in all; None for equal ones. Holm's
            method then takes the differences by their p-values over their weights.
    """
    tested = {number: error for number, error in enumerate(errors) if error is not None}
    shares = {n: 1 / len(tested) if weights is None else weights[n] for n in tested}
    reaches = {n: t_quantile(1 - alpha * shares[n] / 2, e.df) * e.value for n, e in tested.items()}
    ratios = {n: 2 * t_cdf(-abs(values[n]) / e.value, e.df) / shares[n] for n, e in tested.items()}
    judged = [FamilyTest(value, value, 1.0) for value in values]
    total = left = math.fsum(shares.values())
    largest = kept = 0.0
    for index in sorted(tested, key=ratios.__getitem__):
        value, reach, share = values[index], reaches[index], shares[index]
        # what is left of the error goes to the differences that are left, by their weights
        largest = max(largest, min(1.0, ratios[index] * left / (total - kept)))
        is_found, low, high = largest <= alpha, value - reach, value + reach
        if margin is not None and not (-margin < low and high < margin):
            kept += 0.5 * share
        left -= share
        if is_found and value > 0:
            low = max(low, 0.0)
        elif is_found:
            high = min(high, 0.0)
        else:  # zero is inside; only rounding could say otherwise
            low, high = min(low, -math.ulp(0.0)), max(high, math.ulp(0.0))
        judged[index] = FamilyTest(low, high, largest)
    return judged


_WITHOUT_BOUND = {"bounded": "unbounded", "equivalent": "unbounded", "worse within": "worse"}


def judge_interval(
    low: float,
    high: float,
    better: Literal["lower", "higher", "neither"],
    margin: float | None,
    went_wrong: int = 0,
) -> str:
    """Return the name of the verdict on a difference.

    Args:
        low: Lower end of the simultaneous interval; a difference is claimed from 0 on.
        high: Upper end; a difference is claimed up to 0.
        better: The direction of the metric; ``neither`` also for interactions.
        margin: A cost that does not matter; None without one.
        went_wrong: Trainings in it that went wrong, beside which no cost is bounded.
    """
    if went_wrong:
        name = judge_interval(low, high, better, margin)
        return _WITHOUT_BOUND.get(name, name)
    if better == "neither":
        if low >= 0 or high <= 0:
            return "higher" if low >= 0 else "lower"
        is_small = margin is not None and -margin < low and high < margin
        return "equivalent" if is_small else "within noise" if margin is None else "undecided"
    best_cost, worst_cost = (low, high) if better == "lower" else (-high, -low)
    if worst_cost <= 0:
        return "better"
    is_cheap = margin is not None and worst_cost < margin
    if best_cost >= 0:
        return "worse within" if is_cheap else "worse"
    return "bounded" if is_cheap else "within noise" if margin is None else "undecided"
