"""The history of a search: its suggestions and what became of them.

<store>/sweeps/<name>/search.json    what suggestions depend on, and what was spent
                      points/        one file for each suggestion
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.sealed_files import set_aside, write_sealed_json
from kvlab.spec.search_config import SearchConfig
from kvlab.store import Store
from kvlab.store.record_forms import read_record
from kvlab.store.store_paths import POINTS_FOLDER, SearchPoints, list_point_files
from kvlab.sweep.planning.planner import Plan

HISTORY_FILE = "search.json"

# Keys in a file of points/, in the order of the fields of `Observation` and `Suggestion`
_OBSERVATION_KEYS = ("params", "state", "values", "excess", "notes", "rungs")
_SUGGESTION_KEYS = ("level", "patch", "trial", "flops", "why", "training", "steps", "kept", "cell")

Params = dict[str, Any]
"""Parameter -> an index into its choices, or a number of its range."""

ObservationState = Literal["open", "ok", "beyond", "lost", "pruned"]


@dataclass
class Observation:
    """What a sampler learns from one suggestion.

    Attributes:
        params: What was suggested.
        state: ``open``: it has no values yet. ``ok``: it has. ``beyond``: it violates a limit, has
            diverged, or is impossible. ``lost``: it failed, which says nothing. ``pruned``: it
            waits at its last rung.
        values: Of the objectives.
        violations: By how much each limit is violated, relative to it; above 0 if it is.
        sampler_attrs: The sampler's own notes.
        rung_losses: Validation loss at each rung that it has reached, in nats per token.
    """

    params: Params
    state: ObservationState = "open"
    values: list[float] = field(default_factory=list)
    violations: dict[str, float] = field(default_factory=dict)
    sampler_attrs: dict[str, Any] = field(default_factory=dict)
    rung_losses: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return dict(zip(_OBSERVATION_KEYS, vars(self).values(), strict=True))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Observation":
        return cls(*(data[key] for key in _OBSERVATION_KEYS))


@dataclass
class Suggestion:
    """One suggestion of a search.

    Attributes:
        observation: What was suggested, and what became of it.
        level: Its level of the search's factor.
        patch: Of the base experiment, in dotted keys.
        trial_id: Empty if it has no trial.
        flops: Of its whole training.
        skip_reason: Why it has no trial of its own, if there is a reason.
        training_id: Of its trial.
        steps: Of its whole training.
        is_promoted: Whether a person wants it to be trained to the end, whatever the rungs say.
        cell: Its cell, as ``sweep.json`` lists cells; None if it has none.
    """

    observation: Observation
    level: str
    patch: dict[str, Any]
    trial_id: str = ""
    flops: int = 0
    skip_reason: str = ""
    training_id: str = ""
    steps: int = 0
    is_promoted: bool = False
    cell: dict[str, Any] | None = None

    @property
    def has_trial(self) -> bool:
        """Whether it has a trial of its own."""
        return bool(self.trial_id) and not self.skip_reason

    @property
    def is_open(self) -> bool:
        return self.observation.state == "open"

    @property
    def is_pruned(self) -> bool:
        return self.observation.state == "pruned"

    def to_json(self) -> dict[str, Any]:
        past, *facts = vars(self).values()
        return {"past": past.to_json(), **dict(zip(_SUGGESTION_KEYS, facts, strict=True))}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Suggestion":
        return cls(Observation.from_json(data["past"]), *(data[key] for key in _SUGGESTION_KEYS))


def save_history(directory: Path, config: SearchConfig, *, seconds: float, flops: float) -> None:
    """Write what the suggestions of a search depend on, and what was spent on it so far.

    Args:
        directory: Of the sweep. The suggestions lie there in files of their own.
        seconds: Spent searching.
        flops: Spent training.

    Raises:
        StoreError: The history cannot be written.
    """
    identity = _search_identity(config)
    content = {"schema": 2, "search": identity, "seconds": seconds, "flops": flops}
    write_sealed_json(directory / HISTORY_FILE, content)


def load_history(
    directory: Path, points: SearchPoints, config: SearchConfig
) -> tuple[list[Suggestion], float]:
    """Return the suggestions and the seconds spent so far; none if the search has not begun.

    None as well if the history is damaged: suggestions follow from the seed and the results, so
    the search makes the same ones again, and finds the results of their trials.

    Args:
        directory: Of the sweep.
        points: The suggestions there.

    Raises:
        StoreError: The history is of another search.
    """
    try:
        history = read_record(directory / HISTORY_FILE)
        suggestions = [Suggestion.from_json(point) for point in points.read()]
    except (FileNotFoundError, RecordDamaged):
        return [], 0.0
    if history["search"] != _search_identity(config):
        text = f"{directory / HISTORY_FILE} is the history of another search of this name"
        raise StoreError(f"{text}; give the sweep another name, or remove that file")
    if not _are_consecutive(suggestions):
        return [], 0.0
    return suggestions, float(history["seconds"])


def _are_consecutive(suggestions: Sequence[Suggestion]) -> bool:
    """Return whether no suggestion is missing."""
    numbers = range(1, len(suggestions) + 1)
    return all(one.level == format_level(n) for one, n in zip(suggestions, numbers, strict=True))


def format_level(number: int) -> str:
    """Return the level of a suggestion, which are counted from 1."""
    return f"p{number:04d}"


def set_aside_damaged_history(directory: Path, points: SearchPoints) -> Path | None:
    """Move a damaged history into ``damaged/``; return the folder, None if nothing is wrong."""
    try:
        suggestions = [Suggestion.from_json(point) for point in points.read()]
        read_record(directory / HISTORY_FILE)
        is_damaged = not _are_consecutive(suggestions)
    except RecordDamaged:
        is_damaged = True
    except FileNotFoundError:
        is_damaged = bool(list_point_files(directory))
    return set_aside(directory, [HISTORY_FILE, POINTS_FOLDER]) if is_damaged else None


def count_remaining_suggestions(plan: Plan, store: Store | None) -> int:
    """Return how many trials a search may still suggest, with those that have not ended.

    There are at most as many as the budgets of trials and FLOPs allow. A budget of hours alone says
    nothing about their number; then none is counted.

    Returns:
        0 for a sweep without a search.

    Raises:
        StoreError: The history is of another search.
    """
    config = plan.sweep.search
    if config is None:
        return 0
    suggestions: list[Suggestion] = []
    if store is not None:
        name = plan.sweep.name
        directory, points = store.sweep_directory(name), store.search_points(name)
        suggestions, _ = load_history(directory, points, config)
    trained = [suggestion for suggestion in suggestions if suggestion.has_trial]
    allowed = []
    if config.trials is not None:
        allowed.append(config.trials - len(trained))
    if config.flops is not None:  # the suggestion that exceeds the budget is still trained
        spent = sum(suggestion.flops for suggestion in trained)
        allowed.append(math.ceil((config.flops - spent) / max(1, plan.trials[0].flops)))
    unfinished = sum(suggestion.is_open for suggestion in trained)
    return max(0, min(allowed, default=0)) + unfinished


def _search_identity(config: SearchConfig) -> dict[str, Any]:
    """Return what suggestions depend on: with a larger budget the same history goes on."""
    identity = config.model_dump(mode="json")
    for budget in ("trials", "flops", "hours", "parallel"):
        del identity[budget]
    return identity
