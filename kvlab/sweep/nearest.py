"""Why a trial has no result yet: the fields in which it differs from the nearest finished one."""

import json
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvlab.errors import StoreError
from kvlab.files import read_json
from kvlab.spec.experiment import Experiment
from kvlab.sweep.sameness import flat
from kvlab.trial.fingerprint import training_identity, trial_identity
from kvlab.trial.record import Store
from kvlab.trial.trial import Trial


@dataclass(frozen=True)
class Nearest:
    """The finished trial that differs in the fewest fields.

    ``differences`` are (field, value here, value there). None of them means that the finished
    one was made by an older version of the recipe or of the measurement.
    """

    trial: str
    differences: tuple[tuple[str, Any, Any], ...]


def nearest_finished(trial: Trial, store: Store) -> Nearest | None:
    """Compares what identifies ``trial`` with every finished trial of the store; None if it has
    none. Records that are damaged or of an older spec are passed over."""
    training = training_identity(trial.experiment, trial.data_identity, trial.seed, trial.start)
    wanted = _identity(trial.experiment, training)
    best: Nearest | None = None
    for trial_id in store.trial_ids():
        if store.status(trial_id) != "done":
            continue
        found = _recorded(store, trial_id)
        if found is not None:
            nearest = Nearest(trial_id, _differences(wanted, found))
            if best is None or len(nearest.differences) < len(best.differences):
                best = nearest
    return best


def _identity(experiment: Experiment, training: dict[str, Any]) -> dict[str, Any]:
    """What a result depends on, field by field, as JSON gives it back."""
    found = {**trial_identity(experiment, ""), **training}
    return dict(flat(json.loads(json.dumps(found))))


def _recorded(store: Store, trial_id: str) -> dict[str, Any] | None:
    try:
        facts = read_json(store.trial_directory(trial_id) / "trial.json")
        training = read_json(store.training_directory(facts["training"]) / "config.json")
        # JSON has no tuples, so it is validated as JSON
        experiment = Experiment.model_validate_json(json.dumps(facts["experiment"]))
        return _identity(experiment, training)
    except (FileNotFoundError, StoreError, ValidationError, KeyError, TypeError):
        return None


def _differences(wanted: dict[str, Any], found: dict[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    keys = dict.fromkeys((*wanted, *found))
    return tuple(
        (key, wanted.get(key), found.get(key)) for key in keys if wanted.get(key) != found.get(key)
    )
