"""Trials that a driver ends, since they cannot or shall not end themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvlab.store import Status, Store
from kvlab.store.failure import Failure
from kvlab.store.provenance import Origin, build_provenance, utc_now
from kvlab.store.result import build_result
from kvlab.trial.trial import Trial

LOCK_PATIENCE_SECONDS = 5.0
"""Seconds to wait for a process that is about to let go of the trial."""


@contextmanager
def claim_ending(
    trial: Trial, store: Store, over: tuple[Status, ...] = ("damaged",)
) -> Iterator[bool]:
    """Whether the block may write the trial's result: under its lock, an earlier one set aside.

    Args:
        trial: to be ended.
        store: where it is recorded.
        over: results that do not count. With another one it has ended, and the block may not;
            nor may it if some process runs the trial.
    """
    with store.trial_lock(trial.id).hold(patience=LOCK_PATIENCE_SECONDS) as ours:
        status = store.status(trial.id)
        free = ours and (status is None or status in over)
        if free and status is not None:
            store.archive_result(trial.id)
        yield free


def record_failure(trial: Trial, store: Store, origin: Origin, failure: Failure) -> bool:
    """Ends a trial that cannot do so itself, such as one whose process is killed again and again.

    Returns:
        Whether it was recorded: not if some process still runs it, or it has ended after all.
    """
    with claim_ending(trial, store) as free:
        if free:
            facts = build_provenance(
                origin, started=utc_now(), attempts=len(store.attempts(trial.id))
            )
            store.write_result(build_result(trial, "failed", facts, failure=failure))
        return free


# Trials that a search has left at a rung: recorded with their losses there, neither failed nor
# measured. Whoever wants one runs it on from its checkpoint.


def record_pruned(trial: Trial, store: Store, origin: Origin) -> bool:
    """Records that a trial, which has paused, does not go on for now.

    Returns:
        Whether it was recorded: not if some process runs it on, or it has ended after all.
    """
    with claim_ending(trial, store) as free:
        if free:
            training = trial.experiment.training
            rungs = sorted(store.rungs(trial.training_id).items())
            facts = build_provenance(
                origin,
                started=utc_now(),
                attempts=len(store.attempts(trial.id)),
                pauses=store.count_pauses(trial.id),
            )
            pruned = {"step": rungs[-1][0], "steps": training.steps, "loss": rungs[-1][1]}
            result = build_result(trial, "pruned", facts, pruned=pruned)
            result["curves"]["validation_loss"] = [
                [step, step * training.batch_tokens, loss] for step, loss in rungs
            ]
            store.write_result(result)
        return free


def format_pruned(result: dict[str, Any]) -> str:
    """Where a pruned trial stands, from its result."""
    facts = result["pruned"]
    return f"validation loss {facts['loss']:.4f} after step {facts['step']:,} of {facts['steps']:,}"
