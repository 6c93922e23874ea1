"""Estimate what each level does, from matched comparisons.

A *setting* is one combination of levels of the other factors. A *pair* is two trials of one setting
and one seed that differ in the level alone, so both saw the same batches in the same order. A level
without a partner (an excluded cell, a failed trial) has no pair.

Settings whose pairs share trained weights, such as cells that differ only in serving, are not
independent: they are averaged into one *group* first and count once. Groups that were seen at the
same seeds are averaged seed by seed, and the means are tested over the seeds. An interaction takes
four trials instead of two: it is the difference of two differences.

A level without any pair in the design, as in a fractional design, is estimated by a contrast over
all cells at every seed, see `kvlab.analysis.contrasts`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from kvlab.analysis.contrasts import Change, Contrast, Contrasts
from kvlab.analysis.statistics import (
    ALPHA,
    UNTESTED,
    Estimate,
    estimate,
    holm_correction,
    smallest_detectable,
)
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.store.metrics import METRICS

Cells = Mapping[Levels, Mapping[int, TrialRow]]
Factors = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Effect:
    """What one level does, or what two levels do together beyond the sum of each.

    Attributes:
        metric: Name of the metric.
        change: The level, or the two levels, with their factors.
        estimate: The difference; None if there is no matched comparison.
        pairs_used: Matched comparisons used; of a contrast, seeds.
        pairs_designed: Matched comparisons in the design; of a contrast, seeds.
        settings: Number of settings of the other factors.
        groups: Number of groups, after joining settings that share weights.
        seeds: Seeds used.
        by_seed: ``(seed, mean over groups)``; these means are tested.
        by_setting: ``(setting, mean over seeds)``.
        limits: ``(factor, levels)`` where the settings do not cover all levels of a factor.
        aliases: Interactions that the effect is aliased with; only a contrast has any.
        is_contrast: Whether the effect is a contrast over all cells.
        corrected_p: Holm-corrected p-value.
        n_tests: Number of tests that it was corrected for.
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
    aliases: tuple[Change, ...] = ()
    is_contrast: bool = False
    corrected_p: float = 1.0
    n_tests: int = 1

    @property
    def name(self) -> str:
        return change_name(self.change)

    @property
    def value(self) -> float:
        """The estimated difference, 0 without an estimate."""
        return self.estimate.value if self.estimate else 0.0

    @property
    def is_tested(self) -> bool:
        return self.estimate is not None and self.estimate.kind == "tested"

    @property
    def is_significant(self) -> bool:
        """Whether a difference is claimed."""
        is_exact = self.estimate is not None and self.estimate.kind == "exact"
        return is_exact or (self.is_tested and self.corrected_p < ALPHA)

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that is found significant with 80% power.

        It assumes the observed spread. None with two seeds, which hardly estimate a spread.
        """
        if self.estimate is None or not self.is_tested or self.estimate.df < 2:
            return None
        return smallest_detectable(self.estimate.standard_error, self.estimate.df, self.n_tests)

    @property
    def direction(self) -> str:
        """``worse`` or ``better``; ``higher`` or ``lower`` for interactions and neutral metrics."""
        is_positive = self.value > 0
        better = METRICS[self.metric].better
        if better == "neither" or len(self.change) > 1:
            return "higher" if is_positive else "lower"
        return "better" if is_positive == (better == "higher") else "worse"

    @property
    def verdict(self) -> str:
        if self.estimate is None:
            return "no matched pair"
        if self.is_significant:
            return self.direction
        return UNTESTED.get(self.estimate.kind, "within noise")


def change_name(change: Change) -> str:
    """Return ``heads=mqa``, or for two levels ``heads=mqa and position=rope``."""
    return " and ".join(f"{factor}={level}" for factor, level in change)


def estimate_main_effects(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """Estimate the effect of every level against its factor's baseline level.

    Returns:
        One effect per level that is not a baseline level, Holm-corrected together.
    """
    changes = [((f, level),) for f, levels in factors.items() for level in levels[1:]]
    contrasts = Contrasts(list(cells), factors)
    return apply_holm([_estimate_effect(cells, factors, c, metric, contrasts) for c in changes])


def estimate_interactions(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """Estimate the interaction of every two levels that the design has together.

    Returns:
        One effect per pair of levels of two factors, Holm-corrected together.
    """
    changes = [
        ((first, one), (second, other))
        for first, second in combinations(factors, 2)
        for one, other in product(factors[first][1:], factors[second][1:])
    ]
    contrasts = Contrasts(list(cells), factors)
    effects = (_estimate_effect(cells, factors, c, metric, contrasts) for c in changes)
    return apply_holm([effect for effect in effects if effect.pairs_designed])


def list_compared_cells(cells: Cells, factors: Factors, change: Change) -> set[Levels]:
    """Return the cells that the estimate of a change is made from; empty if there is none.

    Args:
        cells: The cells of the design; their trials are not read.
        factors: Factor -> levels, the baseline's first.
        change: The level, or the two levels.
    """
    corners = {cell for one in _matched_corners(cells, factors, change) for _, cell in one}
    if corners:
        return corners
    contrast = Contrasts(list(cells), factors).of(change)
    return set(contrast.weights) if contrast is not None else set()


def apply_holm(effects: list[Effect]) -> list[Effect]:
    """Correct the p-values of effects as one family, for all effects that are tested."""
    tested = [effect for effect in effects if effect.estimate and effect.is_tested]
    p_values = iter(holm_correction([effect.estimate.p for effect in tested if effect.estimate]))
    return [
        replace(effect, corrected_p=next(p_values), n_tests=len(tested))
        if effect.is_tested
        else effect
        for effect in effects
    ]


def _estimate_effect(
    cells: Cells, factors: Factors, change: Change, metric: str, contrasts: Contrasts
) -> Effect:
    pairs_designed = 0
    settings: list[Setting] = []
    for corners in _matched_corners(cells, factors, change):
        pairs_designed += len(set.intersection(*(set(cells[levels]) for _, levels in corners)))
        setting = _make_setting(cells, factors, change, corners, metric)
        if setting.differences:
            settings.append(setting)
    contrast = None if pairs_designed else contrasts.of(change)
    if contrast is not None:
        return _estimate_contrast(cells, change, metric, contrast)
    groups = largest_balanced_block(
        [drop_incomplete_settings(group) for group in group_by_shared_training(settings)]
    )
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
        pairs_designed=pairs_designed,
        settings=len(used),
        groups=len(groups),
        seeds=seeds,
        by_seed=by_seed,
        by_setting=tuple((s.others, mean(list(s.differences.values()))) for s in used),
        limits=_limiting_levels(factors, change, used),
    )


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
            sums[seed] = sum(values)
            scale = max(scale, sum(map(abs, values)))
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
        aliases=contrast.aliases,
        is_contrast=True,
    )


def _matched_corners(
    cells: Cells, factors: Factors, change: Change
) -> Iterator[list[tuple[int, Levels]]]:
    """Yield the signed cells of the comparison in each setting for which the design has them all.

    An effect of one level has two corners, with signs 1 and -1; an interaction has four.
    """
    names = list(factors)
    places = [(names.index(factor), level, factors[factor][0]) for factor, level in change]
    for levels in cells:
        if any(levels[index] != level for index, level, _ in places):
            continue
        corners = []
        for at_baseline in product((False, True), repeat=len(places)):
            corner = list(levels)
            for (index, _, base), is_base in zip(places, at_baseline, strict=True):
                corner[index] = base if is_base else corner[index]
            corners.append(((-1) ** sum(at_baseline), tuple(corner)))
        if all(corner in cells for _, corner in corners):
            yield corners


@dataclass(frozen=True)
class Setting:
    """A comparison in one setting.

    Attributes:
        others: Levels of the other factors.
        differences: Difference by seed, for the seeds that have all trials.
        trainings: Ids of the trainings involved.
        scale: Largest magnitude of a value that was subtracted.
    """

    others: Levels
    differences: dict[int, float]
    trainings: frozenset[str]
    scale: float


def _make_setting(
    cells: Cells,
    factors: Factors,
    change: Change,
    corners: Sequence[tuple[int, Levels]],
    metric: str,
) -> Setting:
    changed = {factor for factor, _ in change}
    named_levels = zip(factors, corners[0][1], strict=True)
    others = tuple(level for factor, level in named_levels if factor not in changed)
    differences: dict[int, float] = {}
    trainings: set[str] = set()
    scale = 0.0
    for seed in sorted(cells[corners[0][1]]):
        rows = [(sign, cells[levels].get(seed)) for sign, levels in corners]
        measured = [
            (sign, row)
            for sign, row in rows
            if row is not None and row.is_done and metric in row.measurements
        ]
        if len(measured) == len(corners):
            values = [sign * row.measurements[metric] for sign, row in measured]
            differences[seed] = sum(values)
            trainings |= {row.training for _, row in measured}
            scale = max(scale, *map(abs, values))
    return Setting(others, differences, frozenset(trainings), scale)


def group_by_shared_training(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Join settings any of whose trials share a training (union-find)."""
    first_index: dict[str, int] = {}
    parent = list(range(len(settings)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index, setting in enumerate(settings):
        for training in setting.trainings:
            one, other = root(first_index.setdefault(training, index)), root(index)
            parent[max(one, other)] = min(one, other)
    groups: dict[int, list[Setting]] = {}
    for index, setting in enumerate(settings):
        groups.setdefault(root(index), []).append(setting)
    return list(groups.values())


def drop_incomplete_settings(group: Sequence[Setting]) -> list[Setting]:
    """Keep the settings of a group that cover its largest set of seeds, cut to those seeds.

    Otherwise the group's mean would shift at seeds where a setting is missing.
    """
    most = max(len(setting.differences) for setting in group)
    seeds = next(s.differences.keys() for s in group if len(s.differences) == most)
    return [_restrict_seeds(s, set(seeds)) for s in group if s.differences.keys() >= seeds]


def largest_balanced_block(groups: Sequence[Sequence[Setting]]) -> list[list[Setting]]:
    """Choose groups and seeds such that every group has every seed, with as many pairs as possible.

    Several seeds are preferred to one, since one seed gives no error. Candidates are the groups
    with the most seeds, one more at a time, at the seeds that all of them share.

    Args:
        groups: Groups whose settings have equal seeds, see `drop_incomplete_settings`.
    """
    by_seeds = sorted(
        range(len(groups)), key=lambda n: (-len(groups[n][0].differences), _group_seeds(groups[n]))
    )
    best_rank: tuple[bool, int, int] = (False, 0, 0)
    best_groups: set[int] = set()
    best_seeds: set[int] = set()
    shared: set[int] | None = None
    for count, number in enumerate(by_seeds, 1):
        seeds = set(_group_seeds(groups[number]))
        shared = seeds if shared is None else shared & seeds
        rank = (len(shared) > 1, count * len(shared), len(shared))
        if rank > best_rank:
            best_rank, best_groups, best_seeds = rank, set(by_seeds[:count]), set(shared)
    return [
        [_restrict_seeds(setting, best_seeds) for setting in groups[n]] for n in sorted(best_groups)
    ]


def _group_seeds(group: Sequence[Setting]) -> list[int]:
    return sorted(group[0].differences)


def _restrict_seeds(setting: Setting, seeds: set[int]) -> Setting:
    kept = {
        seed: setting.differences[seed] for seed in sorted(setting.differences) if seed in seeds
    }
    return replace(setting, differences=kept)


def mean_by_seed(group: Sequence[Setting]) -> dict[int, float]:
    """Return the mean over a group's settings at each seed."""
    return {seed: mean([s.differences[seed] for s in group]) for seed in group[0].differences}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


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
