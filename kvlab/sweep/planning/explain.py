"""Explain a plan: why two cells compute the same, and why a trial has no result yet."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvlab.errors import StoreError
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.trial.fingerprint import training_identity, trial_identity
from kvlab.trial.trial import Trial

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
    """Return in one line what is written differently, and why that changes nothing."""
    fields = dict(flatten(one.model_dump(mode="json")))
    other_fields = flatten(other.model_dump(mode="json"))
    differing = [
        key
        for key, value in other_fields
        if fields.get(key) != value and key.split(".")[0] not in ("name", "description")
    ]
    if not differing:
        return "the same values"
    reason = next((text for key, text in _REASONS.items() if key in differing), _OTHER_REASON)
    return f"{', '.join(differing)}: {reason}"


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested data as dotted keys with their values."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@dataclass(frozen=True)
class NearestTrial:
    """The finished trial that differs in the fewest fields.

    Attributes:
        trial: Its id.
        differences: Field, value here, value there. If there is none, the finished trial was made
            by an older version of the training or of the measurement.
    """

    trial: str
    differences: tuple[tuple[str, Any, Any], ...]


def find_nearest_trial(trial: Trial, store: Store) -> NearestTrial | None:
    """Compare what identifies a trial with every finished trial of the store.

    Records that are damaged or of an older spec are skipped.

    Returns:
        None if there is no finished trial.
    """
    training = training_identity(
        trial.experiment, trial.data_identity, trial.seed, trial.initial_weights
    )
    fields = _identity_fields(trial.experiment, training)
    nearest: NearestTrial | None = None
    for trial_id in store.trial_ids():
        if store.status(trial_id) != "done":
            continue
        recorded = _read_identity_fields(store, trial_id)
        if recorded is not None:
            candidate = NearestTrial(trial_id, _differing_fields(fields, recorded))
            if nearest is None or len(candidate.differences) < len(nearest.differences):
                nearest = candidate
    return nearest


def _identity_fields(experiment: Experiment, training: dict[str, Any]) -> dict[str, Any]:
    """Return what a result depends on, field by field, as JSON returns it."""
    identity = {**trial_identity(experiment, ""), **training}
    return dict(flatten(json.loads(json.dumps(identity))))


def _read_identity_fields(store: Store, trial_id: str) -> dict[str, Any] | None:
    try:
        record = read_sealed_json(store.trial_directory(trial_id) / "trial.json")
        training = read_sealed_json(store.training_directory(record["training"]) / "config.json")
        # JSON has no tuples, so it is validated as JSON
        experiment = Experiment.model_validate_json(json.dumps(record["experiment"]))
        return _identity_fields(experiment, training)
    except (FileNotFoundError, StoreError, ValidationError, KeyError, TypeError):
        return None


def _differing_fields(
    here: dict[str, Any], there: dict[str, Any]
) -> tuple[tuple[str, Any, Any], ...]:
    keys = dict.fromkeys((*here, *there))
    return tuple(
        (key, here.get(key), there.get(key)) for key in keys if here.get(key) != there.get(key)
    )
