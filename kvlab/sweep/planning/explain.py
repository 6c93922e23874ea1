"""Explain a plan: why two cells compute the same, and why a trial has no result yet."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvlab.errors import StoreError, UsageError
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.store.result import describe_experiment, flatten
from kvlab.store.store import list_cells
from kvlab.sweep.planning.planner import Plan
from kvlab.trial.fingerprint import trial_identity
from kvlab.trial.known_extensions import trust_known
from kvlab.trial.trial import Trial

_ROTATION = ("model.rope_theta", "model.rotary_share", "model.rope_scaling")
_KINDS = ("model.local", "model.global", "model.kinds")
_REASONS = {
    "model.window": "a window of the block size or more is global attention",
    "model.attention_pattern": "the same layers are global and local",
    "model.kv_sharing": "the same layers own their K/V",
    **dict.fromkeys(_ROTATION, "nothing is rotated"),
    **dict.fromkeys(_KINDS, "every layer has the same settings"),
    "serving.tie": "the same cache slots",
    "serving.tie_rule": "nothing is tied",
    "evaluation.served_tokens": "as many tokens are scored",
    "evaluation.hellaswag": "the same items are scored",
}
"""Fields that can be written in several ways for one computation, the strongest reason first."""


def explain_equality(one: Experiment, other: Experiment) -> str:
    """Return in one line what is written differently, and why that changes nothing."""
    here, there = (
        dict(flatten(experiment.model_dump(mode="json", exclude={"name", "description"})))
        for experiment in (one, other)
    )
    differing = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    if not differing:
        return "the same values"
    roots = {*differing, *(".".join(key.split(".")[:2]) for key in differing)}
    otherwise = "where and how often something is done, not what comes out"
    reason = next((text for key, text in _REASONS.items() if key in roots), otherwise)
    return f"{', '.join(differing)}: {reason}"


Difference = tuple[str, Any, Any]
"""A field, its value here and its value there."""

DIGEST = "data.digest"

_TEXT_SETTINGS = ("source", "subset", "paths", "max_bytes", "max_tokens", "validation_fraction")
"""Keys of `data` that select the text. Its digest is what counts."""


NearestTrial = tuple[str, tuple[Difference, ...]]
"""The id of the finished trial that differs in the fewest fields, and these. If there is none, it
was made by an older version of the training or of the measurement."""


@dataclass(frozen=True)
class UnmatchedTrials:
    """Finished trials of a sweep that it no longer asks for, with one reason in common.

    Attributes:
        differences: The fields that have changed, value now and value then. None if the sweep no
            longer has their cells or seeds; empty if an older version of kvlab made them.
    """

    count: int
    differences: tuple[Difference, ...] | None


def find_unmatched_trials(plan: Plan, store: Store) -> list[UnmatchedTrials]:
    """Compare the trials of a plan with those that the sweep had when it was submitted last.

    A trial is compared with the finished one of the same levels and seed. Of each cell one trial
    is compared field by field.

    Returns:
        Groups by reason, the largest first. A text that is not prepared is taken as unchanged.
    """
    try:
        recorded = list_cells(store.sweep(plan.sweep.name))
    except UsageError:
        return []
    planned = {one.trial.id: one.trial for one in plan.trials}
    cells = {frozenset(cell.levels.items()): cell.trials for cell in plan.cells}
    counts = Counter[tuple[Difference, ...] | None]()
    for cell in recorded:
        own = cells.get(frozenset(cell["levels"].items()), {})
        lost = {
            int(seed): trial
            for seed, trial in cell["trials"].items()
            if trial not in planned and store.status(trial) == "done"
        }
        pairs = [(own[seed], trial) for seed, trial in lost.items() if seed in own]
        if len(lost) > len(pairs) and plan.sweep.search is None:  # suggestions are no cells
            counts[None] += len(lost) - len(pairs)
        if pairs and (there := _read_record(store, pairs[0][1])) is not None:
            differences = _list_differences(planned[pairs[0][0]], there)
            if plan.absent:
                text = {DIGEST, *(f"data.{key}" for key in _TEXT_SETTINGS)}
                differences = tuple(one for one in differences if one[0] not in text)
            if differences or not plan.absent:
                counts[differences] += len(pairs)
    return [UnmatchedTrials(count, differences) for differences, count in counts.most_common()]


def find_nearest_trial(trial: Trial, store: Store) -> NearestTrial | None:
    """Compare what identifies a trial with every finished trial of the store.

    Records that are damaged or of an older spec are skipped.
    """
    found = [
        (other, _list_differences(trial, there))
        for other in store.trial_ids()
        if store.status(other) == "done" and (there := _read_record(store, other)) is not None
    ]
    return min(found, key=lambda one: len(one[1]), default=None)


_Record = tuple[Experiment, dict[str, Any]]
"""A finished trial's experiment, and what its result depends on, field by field."""


def _identity_fields(experiment: Experiment, training: dict[str, Any]) -> dict[str, Any]:
    """Return what a result depends on, field by field, as JSON returns it."""
    identity = {**trial_identity(experiment, ""), **training}
    return dict(flatten(json.loads(json.dumps(identity))))


def _read_record(store: Store, trial_id: str) -> _Record | None:
    """Return what a finished trial computed; None if its record is damaged or of an older spec."""
    try:
        record = read_sealed_json(store.trial_directory(trial_id) / "trial.json")
        training = read_sealed_json(store.training_directory(record["training"]) / "config.json")
        # JSON has no tuples, so it is validated as JSON; earlier versions had other settings
        text = json.dumps(record["experiment"])
        trust_known(record["experiment"])
        experiment = Experiment.model_validate_json(text, extra="ignore")
        return experiment, _identity_fields(experiment, training)
    except (FileNotFoundError, StoreError, ValidationError, KeyError):
        return None


def _list_differences(trial: Trial, there: _Record) -> tuple[Difference, ...]:
    """Return the fields in which a trial differs from a finished one.

    Of another text the keys that select it are listed, too.
    """
    fields, other = _identity_fields(trial.experiment, trial.training_identity()), there[1]
    both = ((key, fields.get(key), other.get(key)) for key in {**fields, **other})
    differing = [(key, here, before) for key, here, before in both if here != before]
    if fields.get(DIGEST) != other.get(DIGEST):
        here = describe_experiment(trial.experiment)["data"]
        before = describe_experiment(there[0])["data"]
        changed = [key for key in _TEXT_SETTINGS if here[key] != before[key]]
        differing += [(f"data.{key}", here[key], before[key]) for key in changed]
    # tuples, so that equal differences are one group
    return tuple((key, _freeze(here), _freeze(before)) for key, here, before in differing)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
