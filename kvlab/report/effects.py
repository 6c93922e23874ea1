"""What a level does, from matched comparisons alone.

A *setting* is one combination of levels of the other factors. A *pair* is two trials of one
setting and one seed that differ in the level alone; so both saw the same batches in the same
order. Where the level has no partner (an excluded cell, a failed trial), there is no pair.

Settings whose pairs share trained weights (as cells that differ only in serving do) are not
independent: they are averaged into one *group* first, and groups are what is counted.
An interaction takes four trials instead of two: the difference of two differences.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

from kvlab.report.rows import Levels, TrialRow
from kvlab.report.statistics.grouped import Estimate, estimate, smallest_detectable
from kvlab.report.statistics.holm import holm
from kvlab.trial.metrics import METRICS

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
        by_seed: seed -> mean over groups. ``by_setting``: setting -> mean over seeds.
        limits: factor -> its levels in those settings, where that is not all of its levels.
        corrected: Holm-corrected p. ``tests``: how many it was corrected for.
    """

    metric: str
    change: tuple[tuple[str, str], ...]
    estimate: Estimate | None
    comparisons: int
    designed: int
    settings: int
    groups: int
    seeds: tuple[int, ...]
    by_seed: tuple[tuple[int, float], ...]
    by_setting: tuple[tuple[Levels, float], ...]
    limits: tuple[tuple[str, tuple[str, ...]], ...]
    corrected: float = 1.0
    tests: int = 1

    @property
    def name(self) -> str:
        return " and ".join(f"{factor}={level}" for factor, level in self.change)

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
        """The smallest true difference that would have been called with 80% power."""
        if self.estimate is None or not self.tested:
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
        words = {"one seed": "one seed: not tested", "identical": "identical"}
        return words.get(self.estimate.kind, "within noise")


def main_effects(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """One effect for every level that is not a baseline level, Holm-corrected together."""
    changes = [((f, level),) for f, levels in factors.items() for level in levels[1:]]
    return corrected([_effect(cells, factors, change, metric) for change in changes])


def interactions(cells: Cells, factors: Factors, metric: str) -> list[Effect]:
    """One for every two levels of two factors that the design has together, corrected."""
    changes = [
        ((first, one), (second, other))
        for first, second in combinations(factors, 2)
        for one, other in product(factors[first][1:], factors[second][1:])
    ]
    found = (_effect(cells, factors, change, metric) for change in changes)
    return corrected([effect for effect in found if effect.designed])


def corrected(effects: list[Effect]) -> list[Effect]:
    """Effects with their p-values corrected together (Holm 1979)."""
    tested = [effect for effect in effects if effect.estimate and effect.tested]
    p_values = iter(holm([effect.estimate.p for effect in tested if effect.estimate]))
    return [
        replace(effect, corrected=next(p_values), tests=len(tested)) if effect.tested else effect
        for effect in effects
    ]


@dataclass(frozen=True)
class _Setting:
    """One setting: its difference at every seed that has all its trials."""

    others: Levels
    differences: dict[int, float]
    trainings: frozenset[str]
    scale: float


def _effect(
    cells: Cells, factors: Factors, change: tuple[tuple[str, str], ...], metric: str
) -> Effect:
    designed = 0
    settings: list[_Setting] = []
    for corners in _matched(cells, factors, change):
        designed += len(set.intersection(*(set(cells[levels]) for _, levels in corners)))
        setting = _setting(cells, factors, change, corners, metric)
        if setting.differences:
            settings.append(setting)
    joined = [_complete(group) for group in _sharing_weights(settings)]
    used = [setting for group in joined for setting in group]
    groups = [_averaged(group) for group in joined]
    scale = max((setting.scale for setting in settings), default=1.0)
    found = estimate([list(g.values()) for g in groups], scale) if groups else None
    seeds = tuple(sorted({seed for group in groups for seed in group}))
    return Effect(
        metric,
        change,
        found,
        comparisons=sum(len(setting.differences) for setting in used),
        designed=designed,
        settings=len(used),
        groups=len(groups),
        seeds=seeds,
        by_seed=tuple((s, _mean([g[s] for g in groups if s in g])) for s in seeds),
        by_setting=tuple((s.others, _mean(list(s.differences.values()))) for s in used),
        limits=_limits(factors, change, used),
    )


def _matched(
    cells: Cells, factors: Factors, change: tuple[tuple[str, str], ...]
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


def _setting(
    cells: Cells,
    factors: Factors,
    change: tuple[tuple[str, str], ...],
    corners: Sequence[tuple[int, Levels]],
    metric: str,
) -> _Setting:
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
    return _Setting(others, differences, frozenset(trainings), scale)


def _sharing_weights(settings: Sequence[_Setting]) -> list[list[_Setting]]:
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
    groups: dict[int, list[_Setting]] = {}
    for index, setting in enumerate(settings):
        groups.setdefault(find(index), []).append(setting)
    return list(groups.values())


def _complete(group: Sequence[_Setting]) -> list[_Setting]:
    """A group's settings that were seen at the same, most seeds, cut to those seeds: else the
    group's mean would move with what is missing at a seed."""
    most = max(len(setting.differences) for setting in group)
    seeds = next(s.differences.keys() for s in group if len(s.differences) == most)
    return [
        replace(s, differences={seed: s.differences[seed] for seed in sorted(seeds)})
        for s in group
        if s.differences.keys() >= seeds
    ]


def _averaged(group: Sequence[_Setting]) -> dict[int, float]:
    """Seed -> mean over a group's settings."""
    return {seed: _mean([s.differences[seed] for s in group]) for seed in group[0].differences}


def _limits(
    factors: Factors, change: tuple[tuple[str, str], ...], settings: Sequence[_Setting]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    changed = {factor for factor, _ in change}
    others = [factor for factor in factors if factor not in changed]
    limits = []
    for place, factor in enumerate(others):
        seen = {setting.others[place] for setting in settings}
        if seen and len(seen) < len(factors[factor]):
            limits.append((factor, tuple(level for level in factors[factor] if level in seen)))
    return tuple(limits)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
