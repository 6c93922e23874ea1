"""The history of a search: its suggestions and what became of them.

<store>/sweeps/<name>/search.json    what suggestions depend on, and what was spent
                      points/        one file for each suggestion
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlab.errors import StoreError
from kvlab.spec.search_config import SearchConfig
from kvlab.store.record_forms import read_record
from kvlab.store.store_paths import SearchPoints

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
        state: ``open``: it has no values yet. ``ok``: it has. ``beyond``: it violates a limit, has
            diverged, or is impossible. ``lost``: it failed, which says nothing. ``pruned``: it
            waits at its last rung.
        violations: By how much each limit is violated, relative to it; above 0 if it is.
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
        patch: Of the base experiment, in dotted keys.
        trial_id: Empty if it has no trial.
        skip_reason: Why it has no trial of its own, if there is a reason.
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


def load_history(
    directory: Path, points: SearchPoints, config: SearchConfig
) -> tuple[list[Suggestion], float]:
    """Return the suggestions and the seconds spent so far; none if the search has not begun.

    Raises:
        RecordDamaged: The history is not what was written. A submit moves it aside, and makes the
            same suggestions again from the seed and the results.
        StoreError: The history is of another search.
    """
    try:
        history = read_record(directory / HISTORY_FILE)
    except FileNotFoundError:
        return [], 0.0
    if history["search"] != search_identity(config):
        text = f"{directory / HISTORY_FILE} is the history of another search of this name"
        hint = "give the sweep another name, or remove that file and points/ beside it"
        raise StoreError(f"{text}; {hint}")
    return [Suggestion.from_json(point) for point in points.read()], float(history["seconds"])


def search_identity(config: SearchConfig) -> dict[str, Any]:
    """Return what suggestions depend on: with a larger budget the same history goes on."""
    return config.model_dump(mode="json", exclude={"trials", "flops", "hours", "parallel"})
