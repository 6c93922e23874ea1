"""What a search has found, from its description in ``sweep.json``.

Trials of a search run once, at one seed. So nothing here is a test: the best of many noisy numbers
looks better than it is, and only fresh seeds tell by how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvlab.spec.search_config import format_settings
from kvlab.spec.sweep import SEARCH_FACTOR

BASE_LEVEL = "base"
"""The level of the base experiment, which is no suggestion."""


@dataclass(frozen=True)
class Objective:
    """A number that a search improves.

    Attributes:
        name: A metric, or a number that is known before a trial runs, such as ``kv_bytes``.
    """

    name: str
    is_minimized: bool

    def loss(self, value: float) -> float:
        """Return the value, negated where higher is better."""
        return value if self.is_minimized else -value


@dataclass(frozen=True)
class SuggestedTrial:
    """One suggestion of a search and what became of it.

    Attributes:
        number: Counted from 1, in the order in which suggestions were made.
        trial: Id of its trial; empty if it has none of its own.
        state: ``ok``: measured and within the limits. ``beyond``: it breaks a limit, has diverged
            or is impossible. ``lost``: it failed. ``pruned``: paused at a rung. ``open``: it has
            not ended.
        values: Of the objectives; empty if they were not measured.
        violations: By how much each limit is broken, relative to it; above 0 if it is.
        reason: Why it has no trial of its own.
    """

    number: int
    level: str
    settings: Mapping[str, Any]
    trial: str
    state: str
    values: tuple[float, ...]
    violations: Mapping[str, float]
    reason: str

    @property
    def is_eligible(self) -> bool:
        """Whether it can be the best: measured, and within the limits."""
        return self.state == "ok" and bool(self.trial)

    @property
    def is_measured(self) -> bool:
        return bool(self.values) and bool(self.trial)


class SearchResults:
    """A search and its suggestions.

    Attributes:
        config: As written in the sweep, with defaults filled in.
        stop_reason: Why no more suggestions are made; empty if the search has not ended.
        spent_flops: Training FLOPs, without those of the base experiment.
        spent_seconds: Time spent searching, over all runs.
        importances: Objective -> parameter -> share of the variation that it explains (fANOVA).
    """

    def __init__(self, search: Mapping[str, Any]):
        self.config = search
        directions = search.get("directions") or ["minimize"] * len(search["objectives"])
        self.objectives = tuple(
            Objective(name, direction == "minimize")
            for name, direction in zip(search["objectives"], directions, strict=True)
        )
        same = ("level", "settings", "trial", "state", "violations", "reason")
        self.suggestions = tuple(
            SuggestedTrial(n, values=tuple(one["values"]), **{key: one[key] for key in same})
            for n, one in enumerate(search.get("suggestions", ()), 1)
        )
        self.stop_reason = str(search.get("stop_reason", ""))
        self.spent_flops = float(search.get("spent_flops", 0.0))
        self.spent_seconds = float(search.get("spent_seconds", 0.0))
        self.importances: Mapping[str, Mapping[str, float]] = search.get("importances", {})

    @property
    def keys(self) -> tuple[str, ...]:
        """The dotted keys that are varied."""
        return (*self.config["choices"], *self.config["ranges"])

    @cached_property
    def trials(self) -> tuple[SuggestedTrial, ...]:
        """The suggestions that have a trial of their own."""
        return tuple(one for one in self.suggestions if one.trial)

    @cached_property
    def by_level(self) -> dict[str, SuggestedTrial]:
        return {one.level: one for one in self.suggestions}

    @cached_property
    def eligible(self) -> tuple[SuggestedTrial, ...]:
        """The measured trials that keep every limit."""
        return tuple(one for one in self.suggestions if one.is_eligible)

    def ranked(self, number: int) -> list[SuggestedTrial]:
        """Return the eligible trials by one objective, the best first; of equals, the earlier."""
        objective = self.objectives[number]
        return sorted(self.eligible, key=lambda one: objective.loss(one.values[number]))

    @cached_property
    def best(self) -> tuple[SuggestedTrial, ...]:
        """The eligible trials that no other one beats, by the first objective, the best first.

        With one objective these are the best trial and those equal to it.
        """
        front: list[tuple[tuple[float, ...], SuggestedTrial]] = []
        for one in sorted(self.eligible, key=self._losses):  # none is beaten by a later one
            losses = self._losses(one)
            if not any(
                other != losses and all(a <= b for a, b in zip(other, losses, strict=True))
                for other, _ in front
            ):
                front.append((losses, one))
        return tuple(one for _, one in front)

    def _losses(self, one: SuggestedTrial) -> tuple[float, ...]:
        pairs = zip(self.objectives, one.values, strict=True)
        return tuple(objective.loss(value) for objective, value in pairs)

    def leader(self, number: int) -> SuggestedTrial:
        """Return the best trial in one objective; of equals, one that no other trial beats."""
        loss = self.objectives[number].loss
        return min(self.best, key=lambda one: loss(one.values[number]))

    def find_leader(self, name: str) -> SuggestedTrial | None:
        """Return the best trial in an objective by its name, None if there is none."""
        names = [objective.name for objective in self.objectives]
        return self.leader(names.index(name)) if name in names and self.eligible else None

    def improvements(self, number: int) -> list[SuggestedTrial]:
        """Return the eligible trials that were the best in an objective when they were made."""
        objective, found, least = self.objectives[number], [], float("inf")
        for one in self.eligible:
            if objective.loss(one.values[number]) < least:
                least = objective.loss(one.values[number])
                found.append(one)
        return found


def describe_levels(sweep: Mapping[str, Any], levels: Mapping[str, str]) -> str:
    """Return a cell's levels for people; of a search, the settings of the suggestion."""
    if sweep.get("search"):
        patch = sweep["patches"][SEARCH_FACTOR].get(levels.get(SEARCH_FACTOR), {})
        return format_settings(patch) or "base experiment"
    return " ".join(f"{factor}={level}" for factor, level in levels.items())
