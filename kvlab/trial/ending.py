"""Trials that a driver ends, since they cannot or shall not end themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

from kvlab.trial.failure import Failure
from kvlab.trial.origin import Origin
from kvlab.trial.provenance import now, provenance
from kvlab.trial.record import Status, Store
from kvlab.trial.result import result_document
from kvlab.trial.trial import Trial

PATIENCE = 5.0
"""Seconds to wait for a process that is about to let go of the trial."""


@contextmanager
def ending(trial: Trial, store: Store, over: tuple[Status, ...] = ("damaged",)) -> Iterator[bool]:
    """Whether the block may write the trial's result: under its lock, an earlier one set aside.

    Args:
        trial: to be ended.
        store: where it is recorded.
        over: results that do not count. With another one it has ended, and the block may not;
            nor may it if some process runs the trial.
    """
    with store.trial_lock(trial.id).hold(patience=PATIENCE) as ours:
        status = store.status(trial.id)
        free = ours and (status is None or status in over)
        if free and status is not None:
            store.set_aside(trial.id)
        yield free


def record_failure(trial: Trial, store: Store, origin: Origin, failure: Failure) -> bool:
    """Ends a trial that cannot do so itself, such as one whose process is killed again and again.

    Returns:
        Whether it was recorded: not if some process still runs it, or it has ended after all.
    """
    with ending(trial, store) as free:
        if free:
            facts = provenance(origin, started=now(), attempts=len(store.attempts(trial.id)))
            store.write_result(result_document(trial, "failed", facts, failure=failure))
        return free
