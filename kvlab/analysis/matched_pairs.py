"""Which trials a comparison takes: matched pairs, or contrasts where a design has no pairs.

A *setting* is one combination of levels of the other factors. A *pair* is two trials of one setting
and one seed that differ in the level alone, so both saw the same batches in the same order. A level
without a partner (an excluded cell, a failed trial) has no pair. An interaction takes four trials
instead of two: it is the difference of two differences.

Settings whose pairs share trained weights, such as cells that differ only in serving, are not
independent: they are one *group* and count once.

A fraction of a full design leaves out the cells that differ in one level alone. There an effect is
a weighted sum of all cells: the least-squares estimate in the model with every main effect (and,
for an interaction, with that one), in sum-to-zero coding. Terms that the model leaves out bias the
estimate: its *aliases* are the interactions of two and of three factors with a non-zero weight in
it (the alias matrix of Box and Wilson 1951). Those of three are named too: in a design of
resolution IV a main effect has no others.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from kvlab.analysis.trial_rows import Levels, TrialRow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]


Change = tuple[tuple[str, str], ...]
"""A level, or the levels of two or three factors, each as ``(factor, level)``."""

Factors = Mapping[str, tuple[str, ...]]

TOLERANCE = 1e-9

ALIAS_SIZES = (2, 3)
"""Factors of the interactions that may be aliases. Larger ones are taken to be negligible."""


@dataclass(frozen=True)
class Contrast:
    """An effect as a weighted sum of cells.

    Attributes:
        weights: Non-zero weights by cell; they sum to zero.
        aliases: Interactions that the sum contains a part of: those of two factors come first.
    """

    weights: Mapping[Levels, float]
    aliases: tuple[Change, ...]


class Contrasts:
    """The contrasts of one design, each solved at its first use.

    Args:
        cells: The cells of the design.
        factors: Factor -> levels, the baseline's first.
    """

    def __init__(self, cells: Sequence[Levels], factors: Factors):
        self._cells = list(cells)
        self._factors = factors
        self._contrasts: dict[Change, Contrast | None] = {}
        self._columns: dict[tuple[str, str], Vector] = {}

    def of(self, change: Change) -> Contrast | None:
        """Return the contrast that estimates ``change``.

        None if the design cannot separate it from the other main effects.
        """
        if change not in self._contrasts:
            self._contrasts[change] = self._solve(change)
        return self._contrasts[change]

    def _solve(self, change: Change) -> Contrast | None:
        import numpy as np

        main_effects: list[Change] = [
            ((f, level),) for f, levels in self._factors.items() for level in levels[1:]
        ]
        own_terms = product(*(self._levels(factor) for factor, _ in change))
        model = [*main_effects, *own_terms] if len(change) > 1 else main_effects
        intercept = np.ones(len(self._cells))
        matrix = np.column_stack([intercept, *(self._column(term) for term in model)])
        target = np.array([0.0, *(_coefficient_share(term, change) for term in model)])
        weights = np.linalg.lstsq(matrix.T, target, rcond=None)[0]
        if np.abs(matrix.T @ weights - target).max() > TOLERANCE:
            return None
        in_model = set(model)
        aliases = tuple(term for term in self._iter_biasing(weights) if term not in in_model)
        by_cell = zip(self._cells, weights.tolist(), strict=True)
        return Contrast({cell: w for cell, w in by_cell if abs(w) > TOLERANCE}, aliases)

    def _levels(self, factor: str) -> list[tuple[str, str]]:
        return [(factor, level) for level in self._factors[factor][1:]]

    def _iter_biasing(self, weights: "Vector") -> Iterator[Change]:
        """Yield the interactions with a non-zero weight in a sum of cells, smallest first."""
        import numpy as np

        varied = [factor for factor, levels in self._factors.items() if len(levels) > 1]
        for size in ALIAS_SIZES:
            for factors in combinations(varied, size):
                columns = np.ones((len(self._cells), 1))
                for factor in factors:
                    own = np.column_stack([self._column((term,)) for term in self._levels(factor)])
                    columns = (columns[:, :, None] * own[:, None]).reshape(len(columns), -1)
                terms = product(*map(self._levels, factors))
                for term, share in zip(terms, weights @ columns, strict=True):
                    if abs(share) > TOLERANCE:
                        yield term

    def _column(self, term: Change) -> Any:
        """Return a term's column of the model matrix: 1 at its level, -1 at the baseline."""
        import numpy as np

        column = np.ones(len(self._cells))
        for factor, level in term:
            if (factor, level) not in self._columns:
                index, base = list(self._factors).index(factor), self._factors[factor][0]
                self._columns[factor, level] = np.array(
                    [float(c[index] == level) - float(c[index] == base) for c in self._cells]
                )
            column = column * self._columns[factor, level]
        return column


def _coefficient_share(term: Change, change: Change) -> float:
    """Return the weight of a coefficient in the difference from the baseline level.

    In sum-to-zero coding the baseline's coefficient is minus the sum of the others, so the level's
    own coefficient counts twice and each other one once; for two levels, the product of these.
    """
    if [factor for factor, _ in term] != [factor for factor, _ in change]:
        return 0.0
    share = 1.0
    for one, other in zip(term, change, strict=True):
        share *= 2.0 if one == other else 1.0
    return share


# Matched pairs

Cells = Mapping[Levels, Mapping[int, TrialRow]]
Corners = tuple[tuple[int, Levels], ...]
"""The signed cells of a comparison in one setting: two for a level, four for an interaction."""


def find_matched_corners(cells: Cells, factors: Factors, change: Change) -> Iterator[Corners]:
    """Yield the corners of every setting for which the design has them all; signs are 1 and -1."""
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
            yield tuple(corners)


@dataclass(frozen=True)
class Setting:
    """A comparison in one setting.

    Attributes:
        others: Levels of the other factors.
        differences: Difference by seed, for the seeds that have all trials.
        trainings: Ids of the trainings involved.
        scale: Largest magnitude of a value that was subtracted.
        corners: The signed cells.
        has_diverged: Whether any of its trials diverged, at any seed.
    """

    others: Levels
    differences: dict[int, float]
    trainings: frozenset[str]
    scale: float
    corners: Corners = ()
    has_diverged: bool = False


def make_setting(
    cells: Cells, factors: Factors, change: Change, corners: Corners, metric: str
) -> Setting:
    """Take the differences of one setting at every seed that has all of its trials."""
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
            differences[seed] = math.fsum(values)
            trainings |= {row.training for _, row in measured}
            scale = max(scale, *map(abs, values))
    has_diverged = any(
        row.status == "diverged" for _, levels in corners for row in cells[levels].values()
    )
    return Setting(others, differences, frozenset(trainings), scale, corners, has_diverged)


def select_groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Choose the groups of settings, and their seeds, that an effect is the mean of.

    Settings in which a training diverged are left out whole, as long as others are left: what is
    left of them at the other seeds is no fair sample of either side.
    """
    usable = [setting for setting in settings if setting.differences]
    chosen = [setting for setting in usable if not setting.has_diverged] or usable
    groups = group_by_shared_training(chosen)
    return largest_balanced_block([drop_incomplete_settings(group) for group in groups])


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
    return math.fsum(values) / len(values)


def average_weights(groups: Sequence[Sequence[Setting]]) -> dict[Levels, float]:
    """Return the weight of every cell in the mean over groups of the mean over their settings."""
    weights: dict[Levels, float] = {}
    for group in groups:
        for setting in group:
            for sign, levels in setting.corners:
                share = sign / (len(groups) * len(group))
                weights[levels] = weights.get(levels, 0.0) + share
    return weights


def name_trainings(cells: Cells) -> dict[Levels, Levels]:
    """Return for every cell the first one that shares its trained weights."""
    first: dict[str, Levels] = {}
    names: dict[Levels, Levels] = {}
    for levels, by_seed in cells.items():
        shared = (first[row.training] for row in by_seed.values() if row.training in first)
        names[levels] = next(shared, levels)
        for row in by_seed.values():
            if row.training:
                first.setdefault(row.training, names[levels])
    return names


def average_by_training(
    cells: Cells, trainings: Mapping[Levels, Levels], metric: str
) -> dict[Levels, dict[int, float]]:
    """Return the value of every training by seed, the mean over the cells that share it."""
    values: dict[Levels, dict[int, list[float]]] = {}
    for levels, by_seed in cells.items():
        for seed, row in by_seed.items():
            if row.is_done and metric in row.measurements:
                at_seed = values.setdefault(trainings[levels], {}).setdefault(seed, [])
                at_seed.append(row.measurements[metric])
    return {key: {s: mean(v) for s, v in by_seed.items()} for key, by_seed in values.items()}
