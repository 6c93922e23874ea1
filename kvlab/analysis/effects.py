"""Estimate what each level does, from matched comparisons, and judge the levels together.

An effect is a mean over settings; `kvlab.analysis.estimand` says which. Groups of settings that
were seen at the same seeds (`kvlab.analysis.matched_pairs`) are averaged seed by seed, and the
means are tested over the seeds. A level without any pair in the design, as in a fractional design,
is estimated by a contrast over all cells at every seed. The standard error of a level that changes
training is the larger of its own and the pooled one (`kvlab.analysis.standard_errors`); a level of
serving, whose settings share trained weights with the baseline's, keeps its own. Intervals hold for
all effects of one table together, and verdicts are read from them (`kvlab.analysis.verdicts`).

Where settings disagree, their mean describes none of them. So the interactions of a sweep are
tested together, with a fifth of its error. A level that acts differently beside the levels of
another factor is then estimated beside each of them apart, and these parts share its error. A level
of serving is always estimated apart.
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from kvlab.analysis.divergence import (
    Divergence,
    count_contrast_divergence,
    count_divergence,
)
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.matched_pairs import (
    Cells,
    Change,
    Contrast,
    Contrasts,
    Corners,
    Factors,
    Setting,
    average_by_training,
    average_weights,
    find_matched_corners,
    make_setting,
    mean,
    mean_by_seed,
    name_trainings,
    select_groups,
)
from kvlab.analysis.standard_errors import StandardError, pool_errors
from kvlab.analysis.statistics import (
    ALPHA,
    Estimate,
    estimate,
    smallest_detectable,
    t_cdf,
)
from kvlab.analysis.trial_rows import Levels
from kvlab.analysis.verdicts import VERDICTS, judge_family, judge_interval
from kvlab.store.metrics import METRICS

_SAME_WEIGHT = 1e-6
"""Weights of two contrasts that differ by less are equal."""

_NO_WEIGHT = 1e-9
"""Weights below it are rounding errors of weights that cancel."""

LEARNED_UNITS = ("nats/token", "nats", "bits/byte", "")
"""Units of metrics that measure what training has learned, not memory or time."""

SPLIT_SHARE = 0.2
"""Part of alpha at which interactions are tested, and so at which settings are told apart."""


@dataclass(frozen=True)
class Effect:
    """What one level does, or what two levels do together beyond the sum of each.

    Attributes:
        metric: Name of the metric.
        change: The level, or the two levels, with their factors.
        at: Levels of other factors beside which it is estimated; empty for the mean over settings.
        estimate: The difference with its own t-test; None if there is no matched comparison.
        pairs_used: Matched comparisons used; of a contrast, seeds.
        pairs_designed: Matched comparisons in the design; of a contrast, seeds.
        settings: Number of settings of the other factors.
        groups: Number of groups, after joining settings that share weights.
        seeds: Seeds used.
        by_seed: ``(seed, mean over groups)``; these means are tested.
        by_setting: ``(setting, mean over seeds)``.
        limits: ``(factor, levels)`` where the settings do not cover all levels of a factor.
        weights: Weight of every cell in the difference.
        divergence: How often either side diverged; None if nothing did.
        aliases: Interactions that the effect is aliased with; only a contrast has any.
        same_as: ``(sign, interaction)`` of those that are the same contrast, up to its sign.
        is_contrast: Whether the effect is a contrast over all cells.
        error: The standard error that the effect is tested with; None for its own.
        low: Lower end of the simultaneous interval; 0 where zero itself is excluded.
        high: Upper end; 0 where zero itself is excluded.
        corrected_p: p-value, corrected for all effects that are judged together.
        level: Two-sided level of its interval, a part of ``alpha``.
        alpha: Probability of any wrong statement about these effects.
        margin: A cost that does not matter, in the metric's unit; None without one.
        is_claimed: Whether the sweep claims anything of it.
        is_awaited: Whether a look that was declared is still to judge it.
        is_disturbed: Whether it is a difference of times that do not compare.
        went_wrong: Number of trainings in it that went wrong; see `kvlab.analysis.went_wrong`.
        over_all: Of a part, the mean over all settings.
    """

    metric: str
    change: Change
    estimate: Estimate | None
    pairs_used: int
    pairs_designed: int
    settings: int
    groups: int
    seeds: tuple[int, ...]
    by_seed: tuple[tuple[int, float], ...]
    by_setting: tuple[tuple[Levels, float], ...]
    limits: tuple[tuple[str, tuple[str, ...]], ...]
    weights: dict[Levels, float] = field(repr=False, default_factory=dict)
    divergence: Divergence | None = None
    aliases: tuple[Change, ...] = ()
    same_as: tuple[tuple[int, Change], ...] = ()
    is_contrast: bool = False
    error: StandardError | None = None
    low: float = 0.0
    high: float = 0.0
    corrected_p: float = 1.0
    level: float = ALPHA
    alpha: float = ALPHA
    margin: float | None = None
    is_claimed: bool = True
    is_awaited: bool = False
    is_disturbed: bool = False
    went_wrong: int = 0
    at: Change = ()
    over_all: Estimate | None = None

    @property
    def name(self) -> str:
        place = ", ".join(f"{factor}={level}" for factor, level in self.at)
        return f"{change_name(self.change)}{' at ' if place else ''}{place}"

    @property
    def claim(self) -> str:
        """The name without the setting, as in `decide.claims`."""
        return change_name(self.change)

    @property
    def value(self) -> float:
        """The estimated difference, 0 without an estimate."""
        shift = self.error.shift if self.error else 0.0
        return self.estimate.value + shift if self.estimate else 0.0

    @property
    def is_tested(self) -> bool:
        return self.estimate is not None and self.estimate.kind == "tested"

    @property
    def tested_error(self) -> StandardError:
        """The standard error that the effect is tested with; only of a tested effect."""
        assert self.estimate is not None, "only tested effects have an error"
        own = StandardError(self.estimate.standard_error, self.estimate.df)
        return self.error or own

    @property
    def own_p(self) -> float:
        """The p-value of this effect alone, by the error that it is tested with; 1 if untested."""
        if not self.is_tested or self.estimate is None:
            return 1.0
        if self.error is None:
            return self.estimate.p
        if self.error.value == 0:
            return 0.0
        return 2 * t_cdf(-abs(self.value) / self.error.value, self.error.df)

    @property
    def is_significant(self) -> bool:
        """Whether a difference is claimed."""
        return self.verdict_name in ("better", "worse", "worse within", "higher", "lower")

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that is found significant with 80% power.

        It assumes the observed spread. None below two degrees of freedom, which hardly estimate a
        spread.
        """
        if not self.is_tested or self.tested_error.df < 2:
            return None
        error = self.tested_error
        return smallest_detectable(error.value, error.df, self.level)

    @property
    def verdict_name(self) -> str:
        """The name of the verdict in `VERDICTS`."""
        name = self._judge_difference()
        if self.divergence is None or not self.divergence.is_one_sided:
            return name
        if len(self.change) > 1:
            return "diverged"
        is_worse = name in ("worse", "worse within")
        if is_worse and self.divergence.partner > self.divergence.level:
            return "baseline diverged"
        if self.divergence.level:
            return "worse" if is_worse else "diverged"
        return name

    def _judge_difference(self) -> str:
        if self.estimate is None:
            return "unpaired"
        if self.estimate.kind in ("one seed", "unvaried", "identical"):
            return self.estimate.kind
        if self.is_disturbed:
            return "disturbed"
        if not self.is_claimed or self.is_awaited:
            return "awaited" if self.is_awaited else "unclaimed"
        better = METRICS[self.metric].better if len(self.change) == 1 else "neither"
        margin = None if self.went_wrong else self.margin
        name = judge_interval(self.low, self.high, better, margin)
        if margin != self.margin and name == "within noise":
            bounded = judge_interval(self.low, self.high, better, self.margin)
            return "unbounded" if VERDICTS[bounded].concludes else "undecided"
        return name

    @property
    def verdict(self) -> str:
        """The words of the verdict."""
        return VERDICTS[self.verdict_name].words.format(margin=f"{self.margin or 0.0:g}")

    @property
    def has_interval(self) -> bool:
        """Whether the simultaneous interval holds: the effect was tested, and fairly."""
        unfair = ("diverged", "baseline diverged", "unclaimed", "awaited", "disturbed")
        return self.is_tested and self.verdict_name not in unfair


def change_name(change: Change) -> str:
    """Return ``heads=mqa``, or for two levels ``heads=mqa and position=rope``."""
    return " and ".join(f"{factor}={level}" for factor, level in change)


def estimate_main_effects(
    cells: Cells,
    factors: Factors,
    metric: str,
    *,
    estimand: Estimand | None = None,
    claims: Collection[str] | None = None,
    alpha: float = ALPHA,
    margin: float | None = None,
) -> list[Effect]:
    """Estimate the effect of every level against its factor's baseline level.

    Args:
        cells: The rows of every cell by seed.
        factors: Factor -> levels, the baseline's first.
        metric: The metric.
        estimand: Which settings an effect is the mean over; None for all.
        claims: Names of the effects that are judged; None for all.
        alpha: Probability of any wrong statement about them.
        margin: A cost that does not matter, in the metric's unit.

    Returns:
        One effect per level that is not a baseline level, judged together.
    """
    changes = [((f, level),) for f, levels in factors.items() for level in levels[1:]]
    effects = _estimate_effects(cells, factors, changes, metric, estimand)
    if claims is not None:
        effects = [replace(effect, is_claimed=effect.claim in claims) for effect in effects]
    judged = _with_pooled_errors(effects, cells, metric, estimand)
    return judge_together(judged, alpha, margin)


def tell_settings_apart(
    cells: Cells,
    factors: Factors,
    effects: Sequence[Effect],
    interactions: Sequence[Effect],
    estimand: Estimand,
) -> list[Effect]:
    """Replace every level whose settings disagree by one effect for each kind of setting.

    Args:
        cells: The rows of every cell by seed.
        factors: Factor -> levels, the baseline's first.
        effects: Mean effects over settings, see `estimate_main_effects`.
        interactions: Interactions of the same metric, judged.
        estimand: Which settings enter.

    Returns:
        Effects that are judged together.
    """
    parts: list[Effect] = []
    for effect in effects:
        others = _disagreeing_factors(factors, effect, interactions, estimand)
        found = _estimate_parts(cells, factors, effect, others, estimand) if others else []
        parts += found if len(found) > 1 else [effect]
    if not effects or len(parts) == len(effects):
        return list(effects)
    metric, first = effects[0].metric, effects[0]
    judged = _with_pooled_errors(parts, cells, metric, estimand)
    return judge_together(judged, first.alpha, first.margin)


def _disagreeing_factors(
    factors: Factors, effect: Effect, interactions: Sequence[Effect], estimand: Estimand
) -> list[str]:
    """Return the other factors beside whose levels a level's effect differs."""
    others = [factor for factor in factors if factor != effect.change[0][0]]
    if effect.is_contrast or effect.estimate is None or not effect.is_claimed:
        return []
    if estimand.changes_serving_alone(effect.change):
        seen = list(zip(*(levels for levels, _ in effect.by_setting), strict=True))
        return [factor for factor, levels in zip(others, seen, strict=True) if len(set(levels)) > 1]
    found = {
        factor
        for one in interactions
        if one.is_significant and effect.change[0] in one.change
        for factor, level in one.change
        if not estimand.changes_serving_alone(((factor, level),))
    }
    return [factor for factor in others if factor in found]


def _estimate_parts(
    cells: Cells, factors: Factors, effect: Effect, others: Sequence[str], estimand: Estimand
) -> list[Effect]:
    """Estimate a level beside every combination of levels of other factors, apart."""
    places = [list(factors).index(factor) for factor in others]
    matched = estimand.select(list(find_matched_corners(cells, factors, effect.change)))
    roots = [tuple(corners[-1][1][place] for place in places) for corners in matched]
    parts = []
    for levels in dict.fromkeys(roots):
        chosen = [corners for corners, root in zip(matched, roots, strict=True) if root == levels]
        part = _estimate_matched(cells, factors, effect.change, effect.metric, chosen)
        if part.estimate is not None or part.divergence is not None:
            at = tuple(zip(others, levels, strict=True))
            part = replace(part, at=at, over_all=effect.estimate, is_claimed=effect.is_claimed)
            parts.append(replace(part, is_disturbed=effect.is_disturbed))
    return parts


def estimate_interactions(
    cells: Cells,
    factors: Factors,
    metric: str,
    *,
    estimand: Estimand | None = None,
    alpha: float = ALPHA,
    margin: float | None = None,
) -> list[Effect]:
    """Estimate the interaction of every two levels that the design has together.

    Interactions that are one contrast are one effect, which names them all. In a design of single
    levels and one cell with all of them, every pair is the same contrast: what all levels together
    do beyond the sum of each. There the effect is named by all of these levels.

    Args:
        alpha: The sweep's; interactions are judged at `SPLIT_SHARE` of it.

    Returns:
        One effect per contrast, judged together.
    """
    changes = [
        ((first, one), (second, other))
        for first, second in combinations(factors, 2)
        for one, other in product(factors[first][1:], factors[second][1:])
        if _runs_together(cells, factors, ((first, one), (second, other)))
    ]
    effects = _estimate_effects(cells, factors, changes, metric, estimand)
    designed = [one for one in effects if one.pairs_designed]
    distinct = _join_equal_contrasts(designed, factors)
    judged = _with_pooled_errors(distinct, cells, metric, estimand)
    return judge_together(judged, alpha * SPLIT_SHARE, margin)


def _estimate_effects(
    cells: Cells,
    factors: Factors,
    changes: Sequence[Change],
    metric: str,
    estimand: Estimand | None,
) -> list[Effect]:
    """Estimate changes from matched comparisons, or from contrasts where there are none."""
    estimand = estimand or Estimand(list(cells), factors)
    trained = Contrasts([cell for cell in cells if estimand.enters_means(cell)], factors)
    contrasts = Contrasts(list(cells), factors)
    effects = []
    for change in changes:
        matched = estimand.select(list(find_matched_corners(cells, factors, change)))
        contrast = None
        if not sum(len(_shared_seeds(cells, corners)) for corners in matched):
            contrast = trained.of(change)
            # what serving does beside other levels is judged by setting, not mixed with them
            is_served = len(change) > 1 and any(map(estimand.changes_serving_alone, zip(change)))
            if contrast is None and not is_served:
                contrast = contrasts.of(change)
        effects.append(
            _estimate_matched(cells, factors, change, metric, matched)
            if contrast is None
            else _estimate_contrast(cells, change, metric, contrast)
        )
    return effects


def _runs_together(cells: Cells, factors: Factors, change: Change) -> bool:
    """Return whether any cell has all levels of a change."""
    places = [(list(factors).index(factor), level) for factor, level in change]
    return any(all(levels[index] == level for index, level in places) for levels in cells)


def _join_equal_contrasts(effects: list[Effect], factors: Factors) -> list[Effect]:
    """Return one effect for every contrast, up to its sign."""
    sets: dict[frozenset[tuple[Levels, float]], list[Effect]] = {}
    for number, effect in enumerate(effects):
        weights: dict[Levels, float] = {(str(number),): 1.0}  # pairs of its own
        if effect.is_contrast:
            weights = {levels: round(weight, 6) for levels, weight in effect.weights.items()}
        negated = frozenset((levels, -weight) for levels, weight in weights.items())
        key = negated if negated in sets else frozenset(weights.items())
        sets.setdefault(key, []).append(effect)
    return [_name_contrast(one, factors) for one in sets.values()]


def _name_contrast(effects: list[Effect], factors: Factors) -> Effect:
    """Return the first of effects that are one contrast, with the names of all."""
    first, *others = effects
    corner = _find_corner(first.weights, factors) if others else None
    if corner is not None:
        return replace(first, change=corner, aliases=())
    same = {other.change for other in others}
    aliases = tuple(alias for alias in first.aliases if alias not in same)
    signs = (1 if _has_sign(first, other) else -1 for other in others)
    same_as = tuple(zip(signs, (other.change for other in others), strict=True))
    return replace(first, same_as=same_as, aliases=aliases)


def _has_sign(effect: Effect, other: Effect) -> bool:
    """Return whether two equal contrasts have the same sign."""
    cell = next(iter(effect.weights))
    return effect.weights[cell] * other.weights[cell] > 0


def _find_corner(weights: dict[Levels, float], factors: Factors) -> Change | None:
    """Return the levels of a cell that a contrast compares with the sum of its levels, each alone.

    None for other contrasts.
    """
    base = tuple(levels[0] for levels in factors.values())
    for cell, weight in weights.items():
        changed = [index for index, level in enumerate(cell) if level != base[index]]
        singles = [(*base[:i], cell[i], *base[i + 1 :]) for i in changed]
        expected = {cell: 1.0, base: len(changed) - 1.0, **dict.fromkeys(singles, -1.0)}
        if (
            weight > 0
            and len(changed) > 2
            and weights.keys() == expected.keys()
            and all(abs(weights[one] - expected[one]) < _SAME_WEIGHT for one in weights)
        ):
            names = list(factors)
            return tuple((names[index], cell[index]) for index in changed)
    return None


def list_compared_cells(
    cells: Cells, factors: Factors, change: Change, estimand: Estimand | None = None
) -> set[Levels]:
    """Return the cells that the estimate of a change is made from; empty if there is none.

    Args:
        cells: The cells of the design; their trials are not read.
        factors: Factor -> levels, the baseline's first.
        change: The level, or the two levels.
        estimand: Which settings an effect is the mean over; None for all.
    """
    matched = list(find_matched_corners(cells, factors, change))
    chosen = estimand.select(matched) if estimand is not None else matched
    corners = {cell for one in chosen for _, cell in one}
    if corners:
        return corners
    contrast = Contrasts(list(cells), factors).of(change)
    return set(contrast.weights) if contrast is not None else set()


def judge_together(
    effects: Sequence[Effect], alpha: float = ALPHA, margin: float | None = None
) -> list[Effect]:
    """Give effects intervals and p-values that hold for all of them together.

    Every level has an equal part of alpha, which its parts by setting share.
    """
    judged = [replace(e, alpha=alpha, margin=margin, low=e.value, high=e.value) for e in effects]
    family = [number for number, one in enumerate(judged) if _is_judged(one)]
    levels = Counter((judged[number].metric, judged[number].change) for number in family)
    shares = [1 / len(levels) / levels[judged[n].metric, judged[n].change] for n in family]
    errors = [judged[number].tested_error for number in family]
    found = judge_family([judged[n].value for n in family], errors, alpha, margin, shares)
    for number, test, share in zip(family, found, shares, strict=True):
        judged[number] = replace(
            judged[number], low=test.low, high=test.high, corrected_p=test.p, level=alpha * share
        )
    return judged


def _is_judged(effect: Effect) -> bool:
    return effect.is_tested and effect.is_claimed and not effect.is_disturbed


def _with_pooled_errors(
    effects: list[Effect], cells: Cells, metric: str, estimand: Estimand | None
) -> list[Effect]:
    """Set the errors of the effects that change training."""
    trainings = name_trainings(cells)
    pooled: dict[int, dict[Levels, float]] = {}
    used: set[Levels] = set()
    for number, effect in enumerate(effects):
        weights: dict[Levels, float] = {}
        for levels, weight in effect.weights.items():
            weights[trainings[levels]] = weights.get(trainings[levels], 0.0) + weight
        kept = {key: weight for key, weight in weights.items() if abs(weight) > _NO_WEIGHT}
        if effect.is_tested and kept:
            pooled[number] = kept
            used |= effect.weights.keys()
    if not pooled:
        return effects
    compared = {levels: by_seed for levels, by_seed in cells.items() if levels in used}
    values = average_by_training(compared, trainings, metric)
    differences = [dict(effects[number].by_seed) for number in pooled]
    all_seeds = estimand is not None and estimand.all_seeds
    errors = pool_errors(differences, list(pooled.values()), values, all_seeds=all_seeds)
    by_number = dict(zip(pooled, errors, strict=True))
    return [replace(one, error=by_number.get(n)) for n, one in enumerate(effects)]


def _estimate_matched(
    cells: Cells, factors: Factors, change: Change, metric: str, matched: Sequence[Corners]
) -> Effect:
    """Estimate a change as the mean over some settings."""
    settings = [make_setting(cells, factors, change, corners, metric) for corners in matched]
    groups = select_groups(settings)
    used = [setting for group in groups for setting in group]
    group_means = [mean_by_seed(group) for group in groups]
    scale = max((setting.scale for setting in settings), default=1.0)
    seeds = tuple(sorted(group_means[0])) if group_means else ()
    by_seed = tuple((seed, mean([one[seed] for one in group_means])) for seed in seeds)
    return Effect(
        metric,
        change,
        _estimate_over_seeds([value for _, value in by_seed], scale, metric),
        pairs_used=sum(len(setting.differences) for setting in used),
        pairs_designed=sum(len(_shared_seeds(cells, corners)) for corners in matched),
        settings=len(used),
        groups=len(groups),
        seeds=seeds,
        by_seed=by_seed,
        by_setting=tuple((s.others, mean(list(s.differences.values()))) for s in used),
        limits=_limiting_levels(factors, change, used),
        weights=average_weights(groups),
        divergence=count_divergence(cells, matched) if _is_learned(metric) else None,
    )


def _shared_seeds(cells: Cells, corners: Corners) -> set[int]:
    return set.intersection(*(set(cells[levels]) for _, levels in corners))


def _is_learned(metric: str) -> bool:
    """Return whether a metric measures what training has learned, not memory or time."""
    return METRICS[metric].unit in LEARNED_UNITS


def _estimate_over_seeds(by_seed: list[float], scale: float, metric: str) -> Estimate | None:
    return estimate(by_seed, scale, in_steps=METRICS[metric].is_share) if by_seed else None


def _estimate_contrast(cells: Cells, change: Change, metric: str, contrast: Contrast) -> Effect:
    """Estimate one weighted sum of cells per seed, over the seeds that all its cells have."""
    by_cell = [(weight, cells[levels]) for levels, weight in contrast.weights.items()]
    designed_seeds = set.intersection(*(set(by_seed) for _, by_seed in by_cell))
    sums: dict[int, float] = {}
    scale = 0.0
    for seed in sorted(designed_seeds):
        rows = [(weight, by_seed[seed]) for weight, by_seed in by_cell]
        if all(row.is_done and metric in row.measurements for _, row in rows):
            values = [weight * row.measurements[metric] for weight, row in rows]
            sums[seed] = math.fsum(values)
            scale = max(scale, math.fsum(map(abs, values)))
    return Effect(
        metric,
        change,
        _estimate_over_seeds(list(sums.values()), scale, metric),
        pairs_used=len(sums),
        pairs_designed=len(designed_seeds),
        settings=0,
        groups=1 if sums else 0,
        seeds=tuple(sums),
        by_seed=tuple(sums.items()),
        by_setting=(),
        limits=(),
        weights=dict(contrast.weights),
        divergence=(
            count_contrast_divergence(cells, contrast.weights) if _is_learned(metric) else None
        ),
        aliases=contrast.aliases,
        is_contrast=True,
    )


def _limiting_levels(
    factors: Factors, change: Change, settings: Sequence[Setting]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    changed = {factor for factor, _ in change}
    others = [factor for factor in factors if factor not in changed]
    limits = []
    for index, factor in enumerate(others):
        seen = {setting.others[index] for setting in settings}
        if seen and len(seen) < len(factors[factor]):
            limits.append((factor, tuple(level for level in factors[factor] if level in seen)))
    return tuple(limits)
