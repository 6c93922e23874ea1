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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, product
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from kvlab.analysis.trial_rows import Levels, TrialRow

Vector = NDArray[np.float64]


Change = tuple[tuple[str, str], ...]
"""A level, or the levels of two or three factors, each as ``(factor, level)``."""

Factors = Mapping[str, tuple[str, ...]]

TOLERANCE = 1e-9
"""Smaller weights are rounding errors of weights that cancel."""

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


def find_contrast(cells: Sequence[Levels], factors: Factors, change: Change) -> Contrast | None:
    """Return the contrast that estimates a change over all cells of a design.

    Args:
        factors: Factor -> levels, the baseline's first.

    Returns:
        None if the design cannot separate the change from the other main effects.
    """
    table = np.array(cells, dtype=str).reshape(len(cells), len(factors))
    codes: dict[str, Vector] = {}
    for place, (name, levels) in enumerate(factors.items()):
        if len(levels) > 1:
            own = table[:, [place]]
            codes[name] = (own == np.array(levels[1:])).astype(np.float64) - (own == levels[0])

    def list_terms(names: Sequence[str]) -> list[Change]:
        return list(product(*([(name, level) for level in factors[name][1:]] for name in names)))

    def code_terms(names: Sequence[str]) -> Vector:
        """Return the terms' columns of the model matrix: 1 at a level, -1 at the baseline."""
        columns = np.ones((len(table), 1))
        for name in names:
            columns = (columns[:, :, None] * codes[name][:, None]).reshape(len(table), -1)
        return columns

    groups: list[tuple[str, ...]] = [(name,) for name in codes]
    if len(change) > 1:
        groups.append(tuple(factor for factor, _ in change))
    model = [term for names in groups for term in list_terms(names)]
    matrix = np.column_stack([np.ones(len(table)), *map(code_terms, groups)])
    target = np.array([0.0, *(_coefficient_share(term, change) for term in model)])
    weights = np.linalg.lstsq(matrix.T, target, rcond=None)[0]
    if np.abs(matrix.T @ weights - target).max() > TOLERANCE:
        return None
    aliases = tuple(
        term
        for size in ALIAS_SIZES
        for names in combinations(codes, size)
        for term, share in zip(list_terms(names), weights @ code_terms(names), strict=True)
        if abs(share) > TOLERANCE and term not in model
    )
    by_cell = zip(cells, weights.tolist(), strict=True)
    return Contrast({cell: w for cell, w in by_cell if abs(w) > TOLERANCE}, aliases)


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
Corners = tuple[tuple[float, Levels], ...]
"""The weighted cells of a comparison in one setting: two for a level, four for an interaction, with
weights of 1 and -1; all cells of a contrast."""


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
        scale: Largest magnitude of a value that was subtracted.
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

    Of a group the settings that cover its largest set of seeds are kept, cut to those seeds.
    Settings in which a training diverged are left out whole, as long as others are left: what is
    left of them at the other seeds is no fair sample of either side.
    """
    usable = [setting for setting in settings if setting.differences]
    chosen = [setting for setting in usable if not setting.has_diverged] or usable
    groups: dict[int, list[Setting]] = {}
    numbers = group_by_training([setting.trainings for setting in chosen]).tolist()
    for number, setting in zip(numbers, chosen, strict=True):
        groups.setdefault(number, []).append(setting)
    complete = []
    for group in groups.values():  # with a setting missing at a seed, its mean would shift there
        most = max(len(setting.differences) for setting in group)
        seeds = next(set(s.differences) for s in group if len(s.differences) == most)
        kept = [s for s in group if s.differences.keys() >= seeds]
        complete.append([_restrict_seeds(setting, seeds) for setting in kept])
    return largest_balanced_block(complete)


def group_by_training(trainings: Sequence[Collection[str]]) -> NDArray[np.intp]:
    """Number things such that those that share a training have the same number."""
    numbers = np.arange(len(trainings))
    first: dict[str, int] = {}
    for index, ids in enumerate(trainings):
        for training in filter(None, ids):
            other = first.setdefault(training, index)
            numbers[numbers == numbers[index]] = numbers[other]
    return numbers


def largest_balanced_block(groups: Sequence[Sequence[Setting]]) -> list[list[Setting]]:
    """Choose groups and seeds such that every group has every seed, with as many pairs as possible.

    Several seeds are preferred to one, since one seed gives no error. Candidates are the groups
    with the most seeds, one more at a time, at the seeds that all of them share.

    Args:
        groups: Groups whose settings have equal seeds.
    """
    order = sorted(
        range(len(groups)),
        key=lambda n: (-len(groups[n][0].differences), sorted(groups[n][0].differences)),
    )
    seeds = [set(groups[n][0].differences) for n in order]
    shared: list[set[int]] = list(accumulate(seeds, set.intersection))
    ranks = [(len(one) > 1, count * len(one), len(one)) for count, one in enumerate(shared, 1)]
    best = max(range(len(order)), key=ranks.__getitem__, default=-1)
    return [
        [_restrict_seeds(setting, shared[best]) for setting in groups[n]]
        for n in sorted(order[: best + 1])
    ]


def _restrict_seeds(setting: Setting, seeds: set[int]) -> Setting:
    kept = {seed: setting.differences[seed] for seed in sorted(seeds & setting.differences.keys())}
    return replace(setting, differences=kept)


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


def sum_by_training(
    weights: Mapping[Levels, float], trainings: Mapping[Levels, Levels]
) -> dict[Levels, float]:
    """Return the weight of every training in a weighted sum of cells, without those that cancel."""
    sums: dict[Levels, float] = {}
    for levels, weight in weights.items():
        sums[trainings[levels]] = sums.get(trainings[levels], 0.0) + weight
    return {key: weight for key, weight in sums.items() if abs(weight) > TOLERANCE}


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
    return {key: {s: fmean(v) for s, v in by_seed.items()} for key, by_seed in values.items()}
