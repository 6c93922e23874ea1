"""Settings of a comparison, joined into groups where they share trained weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from kvlab.report.contrasts import Change, Contrast, Contrasts
from kvlab.report.statistics import (
    UNTESTED,
    Estimate,
    estimate,
    holm_correction,
    smallest_detectable,
)
from kvlab.report.trial_rows import Levels, TrialRow
from kvlab.store.metrics import METRICS


@dataclass(frozen=True)
class Setting:
    """One setting: its difference at every seed that has all its trials."""

    others: Levels
    differences: dict[int, float]
    trainings: frozenset[str]
    scale: float


def group_by_shared_training(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings joined wherever any of their trials share a training."""
    leader: dict[str, int] = {}
    parent = list(range(len(settings)))

    def find(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for index, setting in enumerate(settings):
        for training in setting.trainings:
            one, other = find(leader.setdefault(training, index)), find(index)
            parent[max(one, other)] = min(one, other)
    groups: dict[int, list[Setting]] = {}
    for index, setting in enumerate(settings):
        groups.setdefault(find(index), []).append(setting)
    return list(groups.values())


def drop_incomplete_settings(group: Sequence[Setting]) -> list[Setting]:
    """A group's settings that were seen at the same, most seeds, cut to those seeds: else the
    group's mean would move with what is missing at a seed."""
    most = max(len(setting.differences) for setting in group)
    seeds = next(s.differences.keys() for s in group if len(s.differences) == most)
    return [
        replace(s, differences={seed: s.differences[seed] for seed in sorted(seeds)})
        for s in group
        if s.differences.keys() >= seeds
    ]


def largest_balanced_block(groups: Sequence[Sequence[Setting]]) -> list[list[Setting]]:
    """The groups that were seen at the same seeds, cut to those: as many pairs as can be, but
    several seeds before one, since one tells no error.

    Tried are the groups with the most seeds, one more at a time, at the seeds that all of these
    have. The settings of a group have the same seeds, see `complete`.
    """
    by_seeds = sorted(
        range(len(groups)), key=lambda n: (-len(groups[n][0].differences), _group_seeds(groups[n]))
    )
    best: tuple[bool, int, int] = (False, 0, 0)
    kept: set[int] = set()
    at: set[int] = set()
    shared: set[int] | None = None
    for count, number in enumerate(by_seeds, 1):
        seen = set(_group_seeds(groups[number]))
        shared = seen if shared is None else shared & seen
        rank = (len(shared) > 1, count * len(shared), len(shared))
        if rank > best:
            best, kept, at = rank, set(by_seeds[:count]), set(shared)
    return [[_restrict_seeds(setting, at) for setting in groups[n]] for n in sorted(kept)]


def _group_seeds(group: Sequence[Setting]) -> list[int]:
    return sorted(group[0].differences)


def _restrict_seeds(setting: Setting, seeds: set[int]) -> Setting:
    kept = {seed: value for seed, value in setting.differences.items() if seed in seeds}
    return replace(setting, differences=kept)


def mean_by_seed(group: Sequence[Setting]) -> dict[int, float]:
    """Seed -> mean over a group's settings."""
    return {seed: mean([s.differences[seed] for s in group]) for seed in group[0].differences}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# What a level does, from matched comparisons alone.
#
# A *setting* is one combination of levels of the other factors. A *pair* is two trials of one
# setting and one seed that differ in the level alone; so both saw the same batches in the same
# order. Where the level has no partner (an excluded cell, a failed trial), there is no pair.
#
# Settings whose pairs share trained weights (as cells that differ only in serving do) are not
# independent: they are averaged into one *group* first, so that they count once. The groups that
# were seen at the same seeds are averaged seed by seed, and tested over the seeds.
# An interaction takes four trials instead of two: the difference of two differences.
#
# A level without any pair in the design, as in a fractional one, is estimated by a contrast over
# all cells, at every seed; what that is aliased with is named (`contrasts`).


ALPHA = 0.05

Cells = Mapping[Levels, Mapping[int, TrialRow]]
Factors = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Effect:
    """What one level does, or two together beyond the sum of each.

    Attributes:
        change: the level, or the two levels, with their factors.
        estimate: None if no matched comparison is there.
        comparisons: matched comparisons used; ``designed`` are those that the design has.
        settings: of the other factors in which it was seen; ``groups`` after joining those
            that share weights.
        seeds: that it was seen at.
        by_seed: seed -> mean over groups, which is what is tested.
        by_setting: setting -> mean over seeds.
        limits: factor -> its levels in those settings, where that is not all of its levels.
        aliases: interactions that it cannot be told apart from; only a contrast has any.
        by_contrast: whether it is a contrast over all cells. Then ``comparisons`` and
            ``designed`` count seeds, and no settings are told apart.
        corrected: Holm-corrected p. ``tests``: how many it was corrected for.
    """

    metric: str
    change: Change
    estimate: Estimate | None
    comparisons: int
    designed: int
    settings: int
    groups: int
    seeds: tuple[int, ...]
    by_seed: tuple[tuple[int, float], ...]
    by_setting: tuple[tuple[Levels, float], ...]
    limits: tuple[tuple[str, tuple[str, ...]], ...]
    aliases: tuple[Change, ...] = ()
    by_contrast: bool = False
    corrected: float = 1.0
    tests: int = 1

    @property
    def name(self) -> str:
        return change_name(self.change)

    @property
    def tested(self) -> bool:
        return self.estimate is not None and self.estimate.kind == "tested"

    @property
    def called(self) -> bool:
        """Whether a difference is claimed."""
        exact = self.estimate is not None and self.estimate.kind == "exact"
        return exact or (self.tested and self.corrected < ALPHA)

    @property
    def detectable(self) -> float | None:
        """The smallest true difference that would have been called with 80% power, by the
        spread that was seen. Two seeds tell no spread worth quoting."""
        if self.estimate is None or not self.tested or self.estimate.df < 2:
            return None
        return smallest_detectable(self.estimate.error, self.estimate.df, self.tests)

    @property
    def direction(self) -> str:
        """``worse``, ``better``, or for a metric that is neither, ``higher`` or ``lower``."""
        up = self.estimate is not None and self.estimate.value > 0
        better = METRICS[self.metric].better
        if better == "neither" or len(self.change) > 1:
            return "higher" if up else "lower"
        return "better" if up == (better == "higher") else "worse"

    @property
    def verdict(self) -> str:
        if self.estimate is None:
            return "no matched pair"
        if self.called:
            return self.direction
        return UNTESTED.get(self.estimate.kind, "within noise")


def change_name(change: Change) -> str:
    """``heads=mqa``, or of an interaction ``heads=mqa and position=rope``."""
    return " and ".join(f"{factor}={level}" for factor, level in change)


def estimate_main_effects(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """One effect for every level that is not a baseline level, Holm-corrected together."""
    changes = [((f, level),) for f, levels in factors.items() for level in levels[1:]]
    contrasts = Contrasts(list(cells), factors)
    return corrected(
        [_estimate_effect(cells, factors, change, metric, contrasts) for change in changes]
    )


def estimate_interactions(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """One for every two levels of two factors that the design has together, corrected."""
    changes = [
        ((first, one), (second, other))
        for first, second in combinations(factors, 2)
        for one, other in product(factors[first][1:], factors[second][1:])
    ]
    contrasts = Contrasts(list(cells), factors)
    found = (_estimate_effect(cells, factors, change, metric, contrasts) for change in changes)
    return corrected([effect for effect in found if effect.designed])


def corrected(effects: list[Effect]) -> list[Effect]:
    """The same effects as one family: each p is Holm-corrected for all that are tested."""
    tested = [effect for effect in effects if effect.estimate and effect.tested]
    p_values = iter(holm_correction([effect.estimate.p for effect in tested if effect.estimate]))
    return [
        replace(effect, corrected=next(p_values), tests=len(tested)) if effect.tested else effect
        for effect in effects
    ]


def _estimate_effect(
    cells: Cells, factors: Factors, change: Change, metric: str, contrasts: Contrasts
) -> Effect:
    designed = 0
    settings: list[Setting] = []
    for corners in _matched_corners(cells, factors, change):
        designed += len(set.intersection(*(set(cells[levels]) for _, levels in corners)))
        setting = _make_setting(cells, factors, change, corners, metric)
        if setting.differences:
            settings.append(setting)
    contrast = None if designed else contrasts.of(change)
    if contrast is not None:
        return _estimate_by_contrast(cells, change, metric, contrast)
    groups = largest_balanced_block(
        [drop_incomplete_settings(group) for group in group_by_shared_training(settings)]
    )
    used = [setting for group in groups for setting in group]
    means = [mean_by_seed(group) for group in groups]
    scale = max((setting.scale for setting in settings), default=1.0)
    seeds = tuple(sorted(means[0])) if means else ()
    by_seed = tuple((seed, mean([one[seed] for one in means])) for seed in seeds)
    found = _estimate_over_seeds([value for _, value in by_seed], scale, metric)
    return Effect(
        metric,
        change,
        found,
        comparisons=sum(len(setting.differences) for setting in used),
        designed=designed,
        settings=len(used),
        groups=len(groups),
        seeds=seeds,
        by_seed=by_seed,
        by_setting=tuple((s.others, mean(list(s.differences.values()))) for s in used),
        limits=_limiting_levels(factors, change, used),
    )


def _estimate_over_seeds(by_seed: list[float], scale: float, metric: str) -> Estimate | None:
    return estimate(by_seed, scale, in_steps=METRICS[metric].in_steps) if by_seed else None


def _estimate_by_contrast(cells: Cells, change: Change, metric: str, contrast: Contrast) -> Effect:
    """One weighted sum a seed; the seeds that all its cells have are what it is tested over."""
    by_cell = [(weight, cells[levels]) for levels, weight in contrast.weights.items()]
    designed = set.intersection(*(set(by_seed) for _, by_seed in by_cell))
    sums: dict[int, float] = {}
    scale = 0.0
    for seed in sorted(designed):
        rows = [(weight, by_seed[seed]) for weight, by_seed in by_cell]
        if all(row.done and metric in row.measurements for _, row in rows):
            values = [weight * row.measurements[metric] for weight, row in rows]
            sums[seed] = sum(values)
            scale = max(scale, sum(map(abs, values)))
    found = _estimate_over_seeds(list(sums.values()), scale, metric)
    return Effect(
        metric,
        change,
        found,
        comparisons=len(sums),
        designed=len(designed),
        settings=0,
        groups=1 if sums else 0,
        seeds=tuple(sums),
        by_seed=tuple(sums.items()),
        by_setting=(),
        limits=(),
        aliases=contrast.aliases,
        by_contrast=True,
    )


def _matched_corners(
    cells: Cells, factors: Factors, change: Change
) -> Iterator[list[tuple[int, Levels]]]:
    """For each setting the signed cells of the comparison, if the design has them all."""
    names = list(factors)
    places = [(names.index(factor), level, factors[factor][0]) for factor, level in change]
    for levels in cells:
        if any(levels[place] != level for place, level, _ in places):
            continue
        corners = []
        for back in product((False, True), repeat=len(places)):
            corner = list(levels)
            for (place, _, base), undo in zip(places, back, strict=True):
                corner[place] = base if undo else corner[place]
            corners.append(((-1) ** sum(back), tuple(corner)))
        if all(corner in cells for _, corner in corners):
            yield corners


def _make_setting(
    cells: Cells,
    factors: Factors,
    change: Change,
    corners: Sequence[tuple[int, Levels]],
    metric: str,
) -> Setting:
    changed = {factor for factor, _ in change}
    pairs = zip(factors, corners[0][1], strict=True)
    others = tuple(level for factor, level in pairs if factor not in changed)
    differences: dict[int, float] = {}
    trainings: set[str] = set()
    scale = 0.0
    for seed in sorted(cells[corners[0][1]]):
        rows = [(sign, cells[levels].get(seed)) for sign, levels in corners]
        known = [(s, r) for s, r in rows if r is not None and r.done and metric in r.measurements]
        if len(known) == len(corners):
            values = [sign * row.measurements[metric] for sign, row in known]
            differences[seed] = sum(values)
            trainings |= {row.training for _, row in known}
            scale = max(scale, *map(abs, values))
    return Setting(others, differences, frozenset(trainings), scale)


def _limiting_levels(
    factors: Factors, change: Change, settings: Sequence[Setting]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    changed = {factor for factor, _ in change}
    others = [factor for factor in factors if factor not in changed]
    limits = []
    for place, factor in enumerate(others):
        seen = {setting.others[place] for setting in settings}
        if seen and len(seen) < len(factors[factor]):
            limits.append((factor, tuple(level for level in factors[factor] if level in seen)))
    return tuple(limits)
