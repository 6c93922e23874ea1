"""Why a trial has no result yet: the fields in which it differs from the nearest finished one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.trial.fingerprint import training_identity, trial_identity
from kvlab.trial.trial import Trial


@dataclass(frozen=True)
class NearestTrial:
    """The finished trial that differs in the fewest fields.

    ``differences`` are (field, value here, value there). None of them means that the finished
    one was made by an older version of the recipe or of the measurement.
    """

    trial: str
    differences: tuple[tuple[str, Any, Any], ...]


def find_nearest_trial(trial: Trial, store: Store) -> NearestTrial | None:
    """Compares what identifies ``trial`` with every finished trial of the store; None if it has
    none. Records that are damaged or of an older spec are passed over."""
    training = training_identity(
        trial.experiment, trial.data_identity, trial.seed, trial.initial_weights
    )
    wanted = _identity_fields(trial.experiment, training)
    best: NearestTrial | None = None
    for trial_id in store.trial_ids():
        if store.status(trial_id) != "done":
            continue
        found = _read_identity_fields(store, trial_id)
        if found is not None:
            nearest = NearestTrial(trial_id, _differing_fields(wanted, found))
            if best is None or len(nearest.differences) < len(best.differences):
                best = nearest
    return best


def _identity_fields(experiment: Experiment, training: dict[str, Any]) -> dict[str, Any]:
    """What a result depends on, field by field, as JSON gives it back."""
    found = {**trial_identity(experiment, ""), **training}
    return dict(flatten(json.loads(json.dumps(found))))


def _read_identity_fields(store: Store, trial_id: str) -> dict[str, Any] | None:
    try:
        facts = read_json(store.trial_directory(trial_id) / "trial.json")
        training = read_json(store.training_directory(facts["training"]) / "config.json")
        # JSON has no tuples, so it is validated as JSON
        experiment = Experiment.model_validate_json(json.dumps(facts["experiment"]))
        return _identity_fields(experiment, training)
    except (FileNotFoundError, StoreError, ValidationError, KeyError, TypeError):
        return None


def _differing_fields(
    wanted: dict[str, Any], found: dict[str, Any]
) -> tuple[tuple[str, Any, Any], ...]:
    keys = dict.fromkeys((*wanted, *found))
    return tuple(
        (key, wanted.get(key), found.get(key)) for key in keys if wanted.get(key) != found.get(key)
    )


# Why two differently written cells compute the same.


_REASONS = {
    "model.window": "a window of the block size or more is global attention",
    "model.attention_pattern": "the same layers are global and local",
    "model.kv_sharing": "the same layers own their K/V",
    "model.rope_theta": "nothing is rotated",
    "serving.tie": "the same cache slots",
    "serving.tie_rule": "nothing is tied",
    "evaluation.served_tokens": "as many tokens are scored",
    "evaluation.hellaswag": "the same items are scored",
}
"""Fields that can be written in several ways for one computation, the strongest reason first."""

_OTHER_REASON = "where and how often something is done, not what comes out"


def explain_equality(one: Experiment, other: Experiment) -> str:
    """One line: what differs in writing, and why that changes nothing."""
    found = dict(flatten(one.model_dump(mode="json")))
    differ = [
        key for key, value in flatten(other.model_dump(mode="json")) if found.get(key) != value
    ]
    differ = [key for key in differ if key.split(".")[0] not in ("name", "description")]
    if not differ:
        return "the same values"
    reason = next((text for key, text in _REASONS.items() if key in differ), _OTHER_REASON)
    return f"{', '.join(differ)}: {reason}"


def flatten(data: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """Nested data as dotted keys with their values."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value
