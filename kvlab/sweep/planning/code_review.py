"""Find the trials that other code has run, and whether to go on would mix code; run them again.

A trial's id does not depend on the code. Its result names the code that trained and measured it, so
that a plan knows which results an edit has left behind.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvlab.analysis.sequential import has_taken_tests
from kvlab.errors import StoreError, UsageError
from kvlab.fs.lease import Fence
from kvlab.fs.lock import Lock
from kvlab.fs.sealed_files import set_aside
from kvlab.humanize import format_count
from kvlab.store import Store
from kvlab.store.store import find_preparing_cells
from kvlab.store.store_paths import POINTS_FOLDER
from kvlab.sweep.planning.planner import Stage, begun_code, trials_to_run
from kvlab.trial.code_identity import TrialCode, this_code

OUTCOMES = ("done", "diverged", "pruned")
"""States whose numbers enter a comparison; a failed trial has none."""

LOCK_SECONDS = 5.0
"""How long to wait for a process that is about to release a trial or a training."""


@dataclass
class CodeReview:
    """The code of a sweep's trials, those that found settings and those of a search included.

    Attributes:
        ended: Trials that have an outcome.
        others: Those of them that other code has trained or measured.
        unknown: How many do not say.
        begun: Trials to run that would go on from what other code has trained.
        to_run: How many trials are to run.
        is_mixed: Whether the comparison has several codes, in training or in measurement, once
            they have run.
    """

    ended: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    unknown: int = 0
    begun: list[str] = field(default_factory=list)
    to_run: int = 0
    is_mixed: bool = False

    @property
    def is_mixing(self) -> bool:
        """Whether to go on mixes code."""
        return self.is_mixed and self.to_run > 0

    def describe(self) -> str:
        """Return the counts in a sentence; empty if no other code is known."""
        parts = []
        if self.others:
            ended = format_count(len(self.ended), "trial")
            parts.append(f"{len(self.others):,} of {ended} that have ended ran other code")
        if self.begun:
            verb = "goes" if len(self.begun) == 1 else "go"
            begun = format_count(len(self.begun), "trial")
            parts.append(f"{begun} to run {verb} on from what other code has trained")
        if parts and self.unknown:
            parts.append(f"{self.unknown:,} do not say")
        return "; ".join(parts)


def review_code(stage: Stage, store: Store, retry_failed: bool = False) -> CodeReview:
    """Review the code of a stage's trials.

    Args:
        stage: From `kvlab.sweep.planning.stages.plan_stage`.
        store: The record.
        retry_failed: Whether failed trials run again.
    """
    found, training, measurement = CodeReview(), set[str](), set[str]()
    to_run = {one.trial.id: one for one in trials_to_run(stage.plan, retry_failed)}
    ended = {one.trial.id: one.code for one in stage.plan.trials if one.state in OUTCOMES}
    begun = {
        trial: begun_code(one.trial, store) if one.has_ended else one.code
        for trial, one in to_run.items()
    }
    trained = {one for one, p in to_run.items() if store.is_trained(p.trial.training_id)}
    for trial, training_id in _list_unplanned(stage, store):
        if trial not in ended and store.status(trial) in OUTCOMES:
            ended[trial] = TrialCode.of(store.code(trial))
        elif training_id and trial not in begun and store.status(trial) is None:
            begun[trial] = TrialCode(tuple(store.training_code(training_id)))
    found.ended = list(ended)
    found.to_run = len(begun) + _has_suggestions_to_come(stage, store)
    states = {trial: code.compare() for trial, code in ended.items()}
    found.others = [trial for trial, state in states.items() if state == "other"]
    found.unknown = sum(state == "unknown" for state in states.values())
    found.begun = [trial for trial, code in begun.items() if code.compare() == "other"]
    if not (found.others or found.begun):
        return found
    for code in (*ended.values(), *begun.values()):
        training.update(code.training)
        measurement.add(code.measurement)
    if found.to_run:
        measurement.add(this_code().measurement)
    if found.to_run > len(trained):
        training.add(this_code().training)
    found.is_mixed = any(len(codes - {""}) > 1 for codes in (training, measurement))
    return found


def _list_unplanned(stage: Stage, store: Store) -> Iterator[tuple[str, str]]:
    """Yield the trials that found settings, and those of suggestions with their trainings."""
    for cell in chain(*find_preparing_cells(stage.record).values()):
        yield from ((trial, "") for trial in cell["trials"].values())
    if stage.plan.sweep.search is not None:
        for point in store.search_points(stage.plan.sweep.name).read():
            if point["trial"] and not point["why"]:
                yield point["trial"], point["training"]


def _has_suggestions_to_come(stage: Stage, store: Store) -> bool:
    """Return whether a search is not over, or was with another budget than it has now."""
    search = stage.plan.sweep.search
    if search is None:
        return False
    recorded: dict[str, Any] = {}
    with contextlib.suppress(UsageError):
        recorded = store.sweep(stage.plan.sweep.name).get("search") or {}
    budget = search.model_dump(mode="json", include={"trials", "flops", "hours"})
    return not recorded.get("stop_reason") or not budget.items() <= recorded.items()


def run_again(stage: Stage, review: CodeReview, store: Store) -> None:
    """Set aside what other code has made, so that the trials of a stage run again.

    Results go to the last attempt of their trial, trainings and stable phases to ``other-code/``.
    What this code has made stays: of a trial that was measured by other code, the training. A
    search makes its suggestions anew.

    Raises:
        UsageError: Claims were tested with these results, or another driver runs the sweep.
        StoreError: A process uses one of them, or the store cannot be written.
    """
    name = stage.plan.sweep.name
    if has_taken_tests(stage.record):
        text = "--code = rerun: claims were tested with the results of other code, and the error"
        hint = "use --code mix, or start anew with another name and seeds that no test has seen"
        raise UsageError(f"{text} holds for these alone; {hint}")
    if store.is_driven(name):
        text = f"--code = rerun: sweep = {name} is being run by another driver, which takes its"
        raise UsageError(f"{text} results as they are; wait for it, or end it with `kvlab stop`")
    planned = {one.trial.id: one.trial for one in stage.plan.trials}
    for trial in review.others:
        with _hold(store.trial_lock(trial)):
            if TrialCode.of(store.code(trial)).compare() == "other":
                store.archive_result(trial)  # else another driver has run it again
    for trial in (*review.others, *review.begun):
        own = planned.get(trial)
        training = own.training_id if own else store.read_training_id(trial)
        trunk = own.trunk_id if own else store.read_trunk_id(trial)
        if training and _is_other(store.training_code(training)):
            with _hold(store.training_lock(training)) as fence:
                store.set_aside_code(store.training_directory(training), fence)
        if trunk and _is_other(store.trunk_code(trunk)):
            with _hold(store.trunk_lock(trunk)) as fence:
                store.set_aside_code(store.trunk_directory(trunk), fence)
    if stage.plan.sweep.search is not None:
        set_aside(store.sweep_directory(name), ["search.json", POINTS_FOLDER], folder="other-code")


def _is_other(training: list[str]) -> bool:
    return TrialCode(tuple(training)).compare() == "other"


@contextlib.contextmanager
def _hold(lock: Lock) -> Iterator[Fence]:
    with lock.hold(timeout=LOCK_SECONDS) as fence:
        if fence is None:
            text = f"{lock.path} is held by {lock.describe_holder()}, so what other code has made"
            raise StoreError(f"{text} cannot be set aside; wait for it, or end it, submit again")
        yield fence
