"""Settings of a comparison, joined into groups where they share trained weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlab.report.rows import Levels


@dataclass(frozen=True)
class Setting:
    """One setting: its difference at every seed that has all its trials."""

    others: Levels
    differences: dict[int, float]
    trainings: frozenset[str]
    scale: float


def sharing_weights(settings: Sequence[Setting]) -> list[list[Setting]]:
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


def complete(group: Sequence[Setting]) -> list[Setting]:
    """A group's settings that were seen at the same, most seeds, cut to those seeds: else the
    group's mean would move with what is missing at a seed."""
    most = max(len(setting.differences) for setting in group)
    seeds = next(s.differences.keys() for s in group if len(s.differences) == most)
    return [
        replace(s, differences={seed: s.differences[seed] for seed in sorted(seeds)})
        for s in group
        if s.differences.keys() >= seeds
    ]


def largest_block(groups: Sequence[Sequence[Setting]]) -> list[list[Setting]]:
    """The groups that were seen at the same seeds, cut to those: as many pairs as can be, but
    several seeds before one, since one tells no error.

    Tried are the groups with the most seeds, one more at a time, at the seeds that all of these
    have. The settings of a group have the same seeds, see `complete`.
    """
    by_seeds = sorted(
        range(len(groups)), key=lambda n: (-len(groups[n][0].differences), _seeds(groups[n]))
    )
    best: tuple[bool, int, int] = (False, 0, 0)
    kept: set[int] = set()
    at: set[int] = set()
    shared: set[int] | None = None
    for count, number in enumerate(by_seeds, 1):
        seen = set(_seeds(groups[number]))
        shared = seen if shared is None else shared & seen
        rank = (len(shared) > 1, count * len(shared), len(shared))
        if rank > best:
            best, kept, at = rank, set(by_seeds[:count]), set(shared)
    return [[_cut(setting, at) for setting in groups[n]] for n in sorted(kept)]


def _seeds(group: Sequence[Setting]) -> list[int]:
    return sorted(group[0].differences)


def _cut(setting: Setting, seeds: set[int]) -> Setting:
    kept = {seed: value for seed, value in setting.differences.items() if seed in seeds}
    return replace(setting, differences=kept)


def averaged(group: Sequence[Setting]) -> dict[int, float]:
    """Seed -> mean over a group's settings."""
    return {seed: mean([s.differences[seed] for s in group]) for seed in group[0].differences}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
