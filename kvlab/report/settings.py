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


def averaged(group: Sequence[Setting]) -> dict[int, float]:
    """Seed -> mean over a group's settings."""
    return {seed: mean([s.differences[seed] for s in group]) for seed in group[0].differences}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
