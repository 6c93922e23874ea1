"""What `kvlab plan` says of finished trials that a sweep no longer asks for, and `--why`."""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from kvlab.errors import StoreError, UsageError
from kvlab.fs.sealed_files import read_sealed_json
from kvlab.humanize import format_count
from kvlab.spec.experiment import Experiment
from kvlab.spec.validation_errors import format_value
from kvlab.store import Store
from kvlab.store.result import describe_experiment, flatten
from kvlab.store.store import list_cells
from kvlab.sweep.planning.planner import Plan, Stage
from kvlab.trial.fingerprint import trial_identity
from kvlab.trial.known_extensions import trust_known
from kvlab.trial.trial import Trial

MAX_NAMED = 3
"""Keys that a line names; --why lists all."""


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--why", nargs="?", const="", metavar="TRIAL",
        help="show which keys have changed since finished trials matched this sweep; or, where none"
        " has, how a trial (default: the first to run) differs from the nearest finished one",
    )  # fmt: skip


def list_unmatched(
    stage: Stage, _least: Plan, store: Store, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the finished trials that no longer match, by reason: as JSON and as lines."""
    groups = find_unmatched_trials(stage.plan, store)
    lines = [line for one in groups for line in one.describe(options.why is not None)]
    return [asdict(one) for one in groups], lines


def explain_missing_result(
    stage: Stage, _least: Plan, store: Store, options: argparse.Namespace
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return how a trial that is still to run differs from the nearest finished one.

    It is nothing if nobody asks, or if what no longer matches is the answer.

    Raises:
        UsageError: No such trial is still to run.
    """
    if options.why is None or (not options.why and find_unmatched_trials(stage.plan, store)):
        return None, []
    missing = [one for one in stage.plan.trials if not one.has_ended]
    found = next((one for one in missing if one.trial.id.startswith(options.why)), None)
    if found is None:
        text = f"--why = {options.why}" if options.why else "--why"
        raise UsageError(f"{text} fits no trial that is still to run; see the plan's list")
    nearest = find_nearest_trial(found.trial, store)
    text = f"{found.trial.id[:8]} ({found.label} seed={found.trial.seed}) has no result: "
    facts: dict[str, Any] = {"trial": found.trial.id, "nearest": None}
    if nearest is None:
        return facts, [f"{text}the store has no finished trial at all."]
    other, differences = nearest
    facts["nearest"] = {"trial": other, "differences": differences}
    if not differences:
        text += f"{other[:8]} asks for the same, and was made by an older version of kvlab's recipe"
        return facts, [f"{text} or measurement."]
    text += f"the nearest finished trial, {other[:8]}, differs in"
    return facts, [text, *_format_fields(differences, "there")]


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

    def describe(self, with_fields: bool) -> Iterator[str]:
        """Yield why they no longer match.

        Args:
            with_fields: List every field with both values.
        """
        verb = "matches" if self.count == 1 else "match"
        text = f"{format_count(self.count, 'finished trial')} no longer {verb} this sweep"
        if self.differences is None:
            yield f"{text}, which has other cells or seeds now."
        elif not self.differences:
            yield f"{text}: made by an older version of kvlab's recipe or measurement."
        elif with_fields:
            yield f"{text}, which differs in"
            yield from _format_fields(self.differences, "then")
        else:
            names = ", ".join(name for name, _, _ in self.differences[:MAX_NAMED])
            more = ", ..." if len(self.differences) > MAX_NAMED else ""
            yield f"{text}, as {names}{more} changed; --why shows the values."


def _format_fields(differences: Iterable[Difference], other: str) -> Iterator[str]:
    """Yield a line for each field: its value now, and that of a finished trial."""
    for key, *values in differences:
        if key == DIGEST:  # of the tokens of the text
            values = [value and str(value)[:12] for value in values]
        now, before = (
            format_value(list(value) if isinstance(value, tuple) else value) for value in values
        )
        yield f"  {key}: {now} {'now' if other == 'then' else 'here'}, {before} {other}"


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
        changed = [key for key in _TEXT_SETTINGS if here.get(key) != before.get(key)]
        differing += [(f"data.{key}", here.get(key), before.get(key)) for key in changed]
    # tuples, so that equal differences are one group
    return tuple((key, _freeze(here), _freeze(before)) for key, here, before in differing)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
