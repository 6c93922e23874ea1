"""How an effect changes with the size of the model: its trend, and what a larger one would show.

At every seed the paired difference is a straight line of log10 N, fitted by least squares over the
sizes. The seed is the replicate, as everywhere: the slopes of the seeds have a one-sample t-test,
so it holds whatever sizes share at a seed. The standard error of a level that changes training is
the larger of its own and the pooled one (`kvlab.analysis.standard_errors`), as for effects;
all levels are judged together (`kvlab.analysis.verdicts`), and a trend is claimed if and only if
zero is not inside its simultaneous interval.

N counts the parameters without the embeddings of tokens and positions, but with the output head:
the weights that multiply every token. Kaplan et al. (2020, arXiv 2001.08361) leave out the head as
well, Hoffmann et al. (2022, arXiv 2203.15556) count everything. In small models embeddings are most
of the parameters and do little, which bends a straight law (Pearce and Song 2024, arXiv
2406.12907); the head's work is real (Porian et al. 2024, arXiv 2406.19146).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import mul, sub

import numpy as np

from kvlab.analysis import matched_pairs as pairs
from kvlab.analysis.effects import Effect, estimate_main_effects
from kvlab.analysis.standard_errors import StandardError, pool_errors
from kvlab.analysis.statistics import ALPHA, Estimate, estimate, sum_squares, t_quantile
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import judge_family
from kvlab.spec.size_config import MAX_EXTRAPOLATION, MIN_SIZES

_GRID = 40
"""Quantiles of each variance in a prediction interval."""


@dataclass(frozen=True)
class Prediction:
    """A difference at one size: the mean of the lines over seeds, and an interval."""

    parameters: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SizeLaw:
    """A straight line of log10 N at every seed.

    Attributes:
        differences: Paired difference by seed and size.
    """

    parameters: tuple[float, ...]
    differences: tuple[tuple[float, ...], ...]

    @property
    def seeds(self) -> int:
        return len(self.differences)

    @cached_property
    def _center(self) -> float:
        logs = [math.log10(count) for count in self.parameters]
        return math.fsum(logs) / len(logs)

    @cached_property
    def _positions(self) -> tuple[float, ...]:
        """log10 N of every size, minus the mean."""
        return tuple(math.log10(count) - self._center for count in self.parameters)

    @cached_property
    def slope_weights(self) -> tuple[float, ...]:
        """Weight of every size's difference in the slope."""
        return tuple(position / sum_squares(self._positions) for position in self._positions)

    @cached_property
    def slopes(self) -> tuple[float, ...]:
        """Change of the difference with ten times the parameters, by seed."""
        products = (map(mul, self.slope_weights, row) for row in self.differences)
        return tuple(map(math.fsum, products))

    @cached_property
    def residual_variance(self) -> float:
        """Variance around the lines, with seeds x (sizes - 2) degrees of freedom; 0 if none."""
        freedom = self.seeds * (len(self.parameters) - 2)
        lines = zip(*map(self.by_seed, self.parameters), strict=True)
        rows = zip(self.differences, lines, strict=True)
        squares = math.fsum(sum_squares(map(sub, row, line)) for row, line in rows)
        return squares / freedom if freedom else 0.0

    def by_seed(self, parameters: float) -> list[float]:
        """Return the line's value at a size, by seed."""
        offset = math.log10(parameters) - self._center
        means = (math.fsum(row) / len(row) for row in self.differences)
        return [mean + slope * offset for mean, slope in zip(means, self.slopes, strict=True)]

    def line(self, parameters: float) -> Prediction:
        """Return the mean of the lines at a size, with its t interval over seeds."""
        value, variance = _mean_and_variance(self.by_seed(parameters))
        half_width = t_quantile(1 - ALPHA / 2, self.seeds - 1) * math.sqrt(variance / self.seeds)
        return Prediction(parameters, value, value - half_width, value + half_width)

    def predict(self, parameters: float) -> Prediction:
        """Predict the mean difference that as many new seeds would show at a size.

        Its variance is that of the line plus that of the new mean. A seed's line at N has the
        variance ``a = t + r h``: ``t`` of the seeds' true lines, ``r`` of the residuals, ``h`` the
        leverage of N. The new mean has ``(t + r) / seeds``, so both together have
        ``(2 a + r (1 - h)) / seeds``. ``a`` and ``r`` are estimated independently; the interval
        integrates over what the data leave open about them (generalized pivotal quantities,
        Weerahandi 1993). `tests/extensions/scaling/test_trends.py` simulates the coverage.

        Raises:
            ValueError: The size is more than ten times the largest, or there is one seed.
        """
        from scipy.special import chdtri, ndtr  # type: ignore[import-untyped]

        largest = max(self.parameters)
        if parameters > MAX_EXTRAPOLATION * largest * (1 + 1e-9):
            text = f"{parameters:.4g} parameters are more than {MAX_EXTRAPOLATION:g} times the"
            raise ValueError(f"{text} largest size ({largest:.4g}); train a larger one")
        if self.seeds < 2:
            raise ValueError("one seed has no spread, so nothing is predicted; add seeds")
        value, variance = _mean_and_variance(self.by_seed(parameters))
        offset = math.log10(parameters) - self._center
        leverage = 1 / len(self.parameters) + offset**2 / sum_squares(self._positions)
        tails = (np.arange(_GRID) + 0.5) / _GRID
        freedom = self.seeds - 1, self.seeds * (len(self.parameters) - 2)
        of_line, of_residuals = (df / chdtri(df, tails) for df in freedom)
        line = variance * of_line[:, None]
        total = 2 * line + self.residual_variance * of_residuals * (1 - leverage)
        deviations = np.sqrt(np.maximum(total, line) / self.seeds)
        if not deviations.any():
            return Prediction(parameters, value, value, value)
        low, high = 0.0, 100.0 * float(deviations.max())
        for _ in range(48):
            middle = (low + high) / 2
            is_short = float(ndtr(middle / deviations).mean()) < 1 - ALPHA / 2
            low, high = (middle, high) if is_short else (low, middle)
        return Prediction(parameters, value, value - high, value + high)


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(values) / len(values)
    return mean, sum_squares(values, mean) / max(1, len(values) - 1)


@dataclass(frozen=True)
class SizeTrend:
    """How the effect of one level changes with size.

    Attributes:
        law: The lines; None if fewer than three sizes share a seed.
        sizes: Level of the size factor for every size of the law.
        seeds: Seeds that have all of these sizes.
        slope: Change of the difference with ten times the parameters; None without a law.
        weights: Weight of every cell in the slope.
        error: Standard error that the slope is tested with; None if it is not tested.
        low: Lower end of its simultaneous interval.
        corrected_p: p-value, corrected for all levels.
        miss: Difference at the largest size minus the line through the other sizes.
        has_diverged: Whether a training of the level or of its baseline diverged.
    """

    factor: str
    level: str
    law: SizeLaw | None
    sizes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    slope: Estimate | None = None
    weights: Mapping[Levels, float] = field(default_factory=dict, repr=False)
    error: StandardError | None = None
    low: float = 0.0
    high: float = 0.0
    corrected_p: float = 1.0
    miss: Estimate | None = None
    has_diverged: bool = False

    @property
    def value(self) -> float:
        """The slope, 0 without a law."""
        return self.slope.value if self.slope else 0.0

    @property
    def has_interval(self) -> bool:
        return self.slope is not None and self.slope.kind == "tested" and not self.has_diverged

    @property
    def verdict(self) -> str:
        """What is claimed of the trend."""
        if self.law is None or self.slope is None:
            return f"fewer than {MIN_SIZES} sizes"
        if self.has_diverged:
            return "diverged"
        if self.slope.kind == "one seed":
            return "one seed: not tested"
        if self.slope.kind == "identical":
            return "the same at every size"
        if self.low >= 0 or self.high <= 0:
            return "rises with size" if self.low >= 0 else "falls with size"
        return "no trend shown"


def list_trends(study: Study) -> list[SizeTrend]:
    """Fit the effect of every level against the size of the model, in the primary metric.

    At each size it is the mean over the settings that effects are the mean over.

    Returns:
        One trend per level, judged together; none unless the sweep has `size`.
    """
    size_factor = study.sized_by
    if size_factor is None:
        return []
    cells, factors, metric = study.cells, study.factors, study.primary_metric
    parameters: Mapping[str, int] = study.sweep["size"]["parameters"]
    own = list(factors).index(size_factor)
    by_level: dict[tuple[str, str], dict[str, Effect]] = {}
    for size in sorted(parameters, key=parameters.__getitem__):
        at_size = {levels: rows for levels, rows in cells.items() if levels[own] == size}
        of_size = {**factors, size_factor: (size,)}
        estimand = replace(study.estimand, cells=tuple(at_size), factors=of_size)
        for effect in estimate_main_effects(at_size, estimand, metric):
            by_level.setdefault(effect.change[0], {})[size] = effect
    trends = []
    for (factor, level), found in by_level.items():
        place, compared = list(factors).index(factor), (level, factors[factor][0])
        has_diverged = any(
            row.status == "diverged"
            for levels, by_seed in cells.items()
            for row in by_seed.values()
            if levels[place] in compared
        )
        trend = _fit_trend(factor, level, found, parameters)
        trends.append(replace(trend, has_diverged=has_diverged))
    tested = [number for number, trend in enumerate(trends) if trend.has_interval]
    trainings = pairs.name_trainings(cells)
    values = pairs.average_by_training(cells, trainings, metric)
    laws = [(trends[n].seeds, law.slopes) for n in tested if (law := trends[n].law)]
    weights = [pairs.sum_by_training(trends[n].weights, trainings) for n in tested]
    errors = pool_errors([dict(zip(*law, strict=True)) for law in laws], weights, values)
    tests = judge_family([trends[n].value for n in tested], errors, study.decide.alpha)
    for number, error, test in zip(tested, errors, tests, strict=True):
        trends[number] = replace(
            trends[number], error=error, low=test.low, high=test.high, corrected_p=test.p
        )
    return trends


def _fit_trend(
    factor: str, level: str, effects: Mapping[str, Effect], parameters: Mapping[str, int]
) -> SizeTrend:
    found = {
        size: dict(effect.by_seed)
        for size, effect in effects.items()
        if effect.estimate is not None and not effect.is_contrast
    }
    seeds = sorted(set.intersection(*map(set, found.values()))) if found else []
    if len(found) < MIN_SIZES or not seeds:
        return SizeTrend(factor, level, None)
    rows = tuple(tuple(by_seed[seed] for by_seed in found.values()) for seed in seeds)
    law = SizeLaw(tuple(float(parameters[size]) for size in found), rows)
    scale = max((abs(value) for row in rows for value in row), default=1.0)
    slope = estimate(law.slopes, scale)
    others = SizeLaw(law.parameters[:-1], tuple(row[:-1] for row in rows))
    refit = others.by_seed(law.parameters[-1])
    weights: dict[Levels, float] = {}
    for share, size in zip(law.slope_weights, found, strict=True):
        for levels, weight in effects[size].weights.items():
            weights[levels] = weights.get(levels, 0.0) + share * weight
    misses = [row[-1] - value for row, value in zip(rows, refit, strict=True)]
    return SizeTrend(
        factor,
        level,
        law,
        tuple(found),
        tuple(seeds),
        slope,
        weights,
        low=slope.low,
        high=slope.high,
        miss=estimate(misses, scale),
    )
