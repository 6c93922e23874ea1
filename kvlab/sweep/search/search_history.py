"""The history of a search: its suggestions and what became of them, in ``search.json``."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlab.errors import RecordDamaged, StoreError
from kvlab.fs.sealed_files import read_sealed_json, set_aside, write_sealed_json
from kvlab.spec.search_config import SearchConfig
from kvlab.store import Store
from kvlab.sweep.planning.planner import Plan

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
        return {
            "params": self.params,
            "state": self.state,
            "values": self.values,
            "excess": self.violations,
            "notes": self.sampler_attrs,
            "rungs": self.rung_losses,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Observation":
        keys = ("params", "state", "values", "excess", "notes", "rungs")
        return cls(*(data[key] for key in keys))


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
        return {
            "past": self.observation.to_json(),
            "level": self.level,
            "patch": self.patch,
            "trial": self.trial_id,
            "flops": self.flops,
            "why": self.skip_reason,
            "training": self.training_id,
            "steps": self.steps,
            "kept": self.is_promoted,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Suggestion":
        keys = ("level", "patch", "trial", "flops", "why", "training", "steps", "kept")
        return cls(Observation.from_json(data["past"]), *(data[key] for key in keys))


def history_path(sweep_directory: Path) -> Path:
    return sweep_directory / "search.json"


def save_history(
    path: Path, config: SearchConfig, suggestions: Sequence[Suggestion], seconds: float
) -> None:
    """Write every suggestion and the time spent.

    Raises:
        StoreError: The history cannot be written.
    """
    points = [suggestion.to_json() for suggestion in suggestions]
    identity = _search_identity(config)
    write_sealed_json(path, {"schema": 1, "search": identity, "seconds": seconds, "points": points})


def load_history(path: Path, config: SearchConfig) -> tuple[list[Suggestion], float]:
    """Return the suggestions and the seconds spent so far; none if the search has not begun.

    None as well if the history is damaged: suggestions follow from the seed and the results, so
    the search makes the same ones again, and finds the results of their trials.

    Raises:
        StoreError: The history is of another search.
    """
    try:
        history = read_sealed_json(path, "search", "points", "seconds")
    except (FileNotFoundError, RecordDamaged):
        return [], 0.0
    if history["search"] != _search_identity(config):
        text = f"{path} is the history of another search of this name"
        raise StoreError(f"{text}; give the sweep another name, or remove that file")
    suggestions = [Suggestion.from_json(point) for point in history["points"]]
    return suggestions, float(history["seconds"])


def set_aside_damaged_history(path: Path) -> Path | None:
    """Move a damaged history into ``damaged/``; return the folder, None if nothing is wrong."""
    try:
        read_sealed_json(path, "search", "points", "seconds")
    except RecordDamaged:
        return set_aside(path.parent, [path.name])
    except FileNotFoundError:
        pass
    return None


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
        path = history_path(store.sweep_directory(plan.sweep.name))
        suggestions, _ = load_history(path, config)
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
