"""Estimate what each level does, from matched comparisons, and judge the levels together.

An effect is a mean over settings; `kvlab.analysis.estimand` says which. Groups of settings that
were seen at the same seeds (`kvlab.analysis.matched_pairs`) are averaged seed by seed, and the
means are tested over the seeds. A level without any pair in the design, as in a fractional design,
is estimated by a contrast over all cells at every seed. The standard error of a level that changes
training is the larger of its own and the pooled one (`kvlab.analysis.standard_errors`); a level of
serving, whose settings share trained weights with the baseline's, keeps its own. Intervals hold for
all effects of one table together, and verdicts are read from them (`kvlab.analysis.verdicts`).

Where settings disagree, their mean describes none of them: `kvlab.analysis.interactions` tells
them apart.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from kvlab.analysis import matched_pairs as pairs
from kvlab.analysis import statistics as stats
from kvlab.analysis import verdicts
from kvlab.analysis.divergence import Divergence, count_divergence
from kvlab.analysis.estimand import Estimand
from kvlab.analysis.matched_pairs import Cells, Change, Corners, Factors
from kvlab.analysis.standard_errors import StandardError, pool_errors
from kvlab.analysis.trial_rows import Levels
from kvlab.store.metrics import METRICS

_LEARNED_UNITS = ("nats/token", "nats", "bits/byte", "")


@dataclass(frozen=True)
class Effect:
    """What one level does, or what two levels do together beyond the sum of each.

    Attributes:
        change: The level, or the two levels, with their factors.
        at: Levels of other factors beside which it is estimated; empty for the mean over settings.
        against: The level that one of an interaction is against; empty for its baseline level.
        estimate: The difference with its own t-test; None if there is no matched comparison.
        pairs_used: Matched comparisons used; of a contrast, seeds.
        pairs_designed: Matched comparisons in the design; of a contrast, seeds.
        groups: Number of groups, after joining settings that share weights.
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
        is_awaited: Whether a test that was declared is still to judge it.
        is_disturbed: Whether it is a difference of times that do not compare.
        went_wrong: Number of trainings in it that went wrong; see `kvlab.analysis.divergence`.
        over_all: Of a part, the mean over all settings.
        least_error: The standard error that its items alone give a share; 0 of other metrics.
    """

    metric: str
    change: Change
    estimate: stats.Estimate | None
    pairs_used: int
    pairs_designed: int
    groups: int
    seeds: tuple[int, ...]
    by_seed: tuple[tuple[int, float], ...]
    by_setting: tuple[tuple[Levels, float], ...] = ()
    limits: tuple[tuple[str, tuple[str, ...]], ...] = ()
    weights: dict[Levels, float] = field(repr=False, default_factory=dict)
    divergence: Divergence | None = None
    aliases: tuple[Change, ...] = ()
    same_as: tuple[tuple[int, Change], ...] = ()
    is_contrast: bool = False
    error: StandardError | None = None
    low: float = 0.0
    high: float = 0.0
    corrected_p: float = 1.0
    level: float = stats.ALPHA
    alpha: float = stats.ALPHA
    margin: float | None = None
    is_claimed: bool = True
    is_awaited: bool = False
    is_disturbed: bool = False
    went_wrong: int = 0
    at: Change = ()
    against: Change = ()
    over_all: stats.Estimate | None = None
    least_error: float = 0.0

    @property
    def name(self) -> str:
        place = ", ".join(f"{factor}={level}" for factor, level in self.at)
        against = f" against {change_name(self.against)}" if self.against else ""
        return f"{change_name(self.change)}{against}{' at ' if place else ''}{place}"

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
        found = self.error or (self.estimate.error if self.estimate else None)
        assert found is not None, "only tested effects have an error"
        return found

    @property
    def is_significant(self) -> bool:
        """Whether a difference is claimed."""
        return self.verdict_name in verdicts.DIFFERENT

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that is found significant with 80% power.

        It assumes the observed spread. None below two degrees of freedom, which hardly estimate a
        spread, and of shares where it is more than they can differ by.
        """
        error = self.tested_error if self.is_tested else None
        if error is None or error.df < 2:
            return None
        found = stats.smallest_detectable(error.value, error.df, self.level)
        return found if found <= self.reach else None

    @property
    def reach(self) -> float:
        """The largest difference that there can be: of shares of items, that of all ones."""
        if METRICS[self.metric].items is None:
            return math.inf
        return math.fsum(weight for weight in self.weights.values() if weight > 0)

    @property
    def verdict_name(self) -> str:
        """The name of the verdict in `VERDICTS`."""
        name = self._judge_difference()
        if self.divergence is None or not self.divergence.is_one_sided:
            return name
        if len(self.change) > 1:
            return "diverged"
        is_worse = name in verdicts.WORSE
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
        return verdicts.judge_interval(self.low, self.high, better, self.margin, self.went_wrong)

    @property
    def verdict(self) -> str:
        """The words of the verdict."""
        return verdicts.write_verdict(self.verdict_name, self.margin, self.metric)

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
    estimand: Estimand,
    metric: str,
    *,
    claims: Collection[str] | None = None,
    alpha: float = stats.ALPHA,
    margin: float | None = None,
) -> list[Effect]:
    """Estimate the effect of every level against its factor's baseline level.

    Args:
        estimand: The factors, and which settings an effect is the mean over.
        claims: Names of the effects that are judged; None for all.
        alpha: Probability of any wrong statement about them.
        margin: A cost that does not matter, in the metric's unit.

    Returns:
        One effect per level that is not a baseline level, judged together.
    """
    factors = estimand.factors
    changes = [((f, level),) for f, levels in factors.items() for level in levels[1:]]
    effects = estimate_changes(cells, factors, changes, metric, estimand)
    if claims is not None:
        effects = [replace(effect, is_claimed=effect.claim in claims) for effect in effects]
    return judge_together(with_pooled_errors(effects, cells, estimand), alpha, margin)


def estimate_changes(
    cells: Cells,
    factors: Factors,
    changes: Sequence[Change],
    metric: str,
    estimand: Estimand,
) -> list[Effect]:
    """Estimate changes from matched comparisons, or from contrasts where there are none."""
    trained = [cell for cell in cells if estimand.enters_means(cell)]
    effects = []
    for change in changes:
        matched = estimand.select(list(pairs.find_matched_corners(cells, factors, change)))
        contrast = None
        if not any(_shared_seeds(cells, corners) for corners in matched):
            contrast = pairs.find_contrast(trained, factors, change)
            # what serving does beside other levels is judged by setting, not mixed with them
            is_served = len(change) > 1 and any(map(estimand.changes_serving_alone, zip(change)))
            if contrast is None and not is_served:
                contrast = pairs.find_contrast(list(cells), factors, change)
        if contrast is None:
            effects.append(estimate_matched(cells, factors, change, metric, matched))
            continue
        corners = tuple((weight, levels) for levels, weight in contrast.weights.items())
        one = estimate_matched(cells, factors, change, metric, [corners])
        one = replace(one, aliases=contrast.aliases, is_contrast=True)
        effects.append(replace(one, by_setting=(), limits=()))
    return effects


def list_compared_cells(cells: Cells, change: Change, estimand: Estimand) -> set[Levels]:
    """Return the cells that the estimate of a change is made from; empty if there is none.

    Args:
        cells: The cells of the design; their trials are not read.
    """
    factors = estimand.factors
    chosen = estimand.select(list(pairs.find_matched_corners(cells, factors, change)))
    if chosen:
        return {cell for corners in chosen for _, cell in corners}
    contrast = pairs.find_contrast(list(cells), factors, change)
    return set(contrast.weights) if contrast is not None else set()


def judge_together(
    effects: Sequence[Effect], alpha: float, margin: float | None = None
) -> list[Effect]:
    """Give effects intervals and p-values that hold for all of them together.

    Every level has an equal part of alpha, which its parts by setting share.
    """
    errors = [
        one.tested_error if one.is_tested and one.is_claimed and not one.is_disturbed else None
        for one in effects
    ]
    levels = Counter(
        (e.metric, e.change) for e, error in zip(effects, errors, strict=True) if error
    )
    shares = [1 / max(1, len(levels)) / max(1, levels[e.metric, e.change]) for e in effects]
    tests = verdicts.judge_family([e.value for e in effects], errors, alpha, margin, shares)
    judged = []
    for one, error, test, share in zip(effects, errors, tests, shares, strict=True):
        low, high = max(test.low, -one.reach), min(test.high, one.reach)
        own = replace(one, alpha=alpha, margin=margin, low=low, high=high)
        judged.append(replace(own, corrected_p=test.p, level=alpha * share) if error else own)
    return judged


def with_pooled_errors(effects: list[Effect], cells: Cells, estimand: Estimand) -> list[Effect]:
    """Set the errors of the effects that change training; all are of one metric.

    Those of a share of items stay their own: its spread depends on how large it is.
    """
    if any(METRICS[effect.metric].items for effect in effects):
        return effects
    trainings = pairs.name_trainings(cells)
    tested = [number for number, effect in enumerate(effects) if effect.is_tested]
    weights = {n: pairs.sum_by_training(effects[n].weights, trainings) for n in tested}
    pooled = {number: own for number, own in weights.items() if own}
    if not pooled:
        return effects
    compared = {levels: cells[levels] for n in pooled for levels in effects[n].weights}
    values = pairs.average_by_training(compared, trainings, effects[0].metric)
    differences = [dict(effects[number].by_seed) for number in pooled]
    contrasts, all_seeds = list(pooled.values()), estimand.all_seeds
    errors = pool_errors(differences, contrasts, values, all_seeds=all_seeds)
    by_number = dict(zip(pooled, errors, strict=True))
    return [replace(one, error=by_number.get(n)) for n, one in enumerate(effects)]


def estimate_matched(
    cells: Cells, factors: Factors, change: Change, metric: str, matched: Sequence[Corners]
) -> Effect:
    """Estimate a change as the mean over some settings."""
    settings = [pairs.make_setting(cells, factors, change, corners, metric) for corners in matched]
    groups = pairs.select_groups(settings)
    used = [setting for group in groups for setting in group]
    group_means = [
        {seed: fmean(one.differences[seed] for one in group) for seed in group[0].differences}
        for group in groups
    ]
    weights: dict[Levels, float] = {}
    for group in groups:
        for sign, levels in (corner for setting in group for corner in setting.corners):
            share = sign / (len(groups) * len(group))
            weights[levels] = weights.get(levels, 0.0) + share
    scale = max((setting.scale for setting in settings), default=1.0)
    others = [factor for factor in factors if factor not in {factor for factor, _ in change}]
    seen = [(f, {one.others[place] for one in used}) for place, f in enumerate(others)]
    seeds = tuple(sorted(group_means[0])) if group_means else ()
    by_seed = tuple((seed, fmean(one[seed] for one in group_means)) for seed in seeds)
    least = _find_item_error(cells, weights, metric, dict(by_seed))
    means, in_steps = [value for _, value in by_seed], METRICS[metric].is_share
    return Effect(
        metric,
        change,
        stats.estimate(means, scale, in_steps=in_steps, least_error=least) if means else None,
        pairs_used=sum(len(setting.differences) for setting in used),
        pairs_designed=sum(len(_shared_seeds(cells, corners)) for corners in matched),
        groups=len(groups),
        seeds=seeds,
        by_seed=by_seed,
        by_setting=tuple((s.others, fmean(s.differences.values())) for s in used),
        limits=tuple(
            (factor, tuple(level for level in factors[factor] if level in levels))
            for factor, levels in seen
            if levels and len(levels) < len(factors[factor])
        ),
        weights=weights,
        divergence=count_divergence(cells, matched) if is_learned(metric) else None,
        least_error=least,
    )


def _shared_seeds(cells: Cells, corners: Corners) -> set[int]:
    return set.intersection(*(set(cells[levels]) for _, levels in corners))


def is_learned(metric: str) -> bool:
    """Return whether a metric measures what training has learned, not memory or time."""
    return METRICS[metric].unit in _LEARNED_UNITS


def _find_item_error(
    cells: Cells, weights: Mapping[Levels, float], metric: str, by_seed: Mapping[int, float]
) -> float:
    """Return the standard error of a weighted sum of shares that their items alone give it.

    0 of a metric without a count of items, and of no difference between cells that share their
    weights, which is no chance.

    Args:
        by_seed: The sum by seed.
    """
    counted = METRICS[metric].items
    names = pairs.name_trainings({levels: cells[levels] for levels in weights})
    is_trained = bool(pairs.sum_by_training(weights, names))
    if counted is None or not (is_trained or any(by_seed.values())):
        return 0.0
    variance = 0.0
    for levels, weight in weights.items():
        rows = [cells[levels][seed].measurements for seed in by_seed]
        own = [stats.share_variance(one[metric], one[counted]) for one in rows if counted in one]
        variance += weight * weight * fmean(own) / len(by_seed) if own else 0.0
    return math.sqrt(variance)
