"""How a trial stands in the record, as a driver sees it."""

from typing import Literal

from kvlab.trial.record import Store

Ended = Literal["done", "failed", "diverged"]


def ended_status(store: Store, trial_id: str) -> Ended | None:
    """How a trial ended; None if it has not, or its result cannot be read and is made again."""
    status = store.status(trial_id)
    return None if status == "damaged" else status


def forget_failure(store: Store, trial_id: str) -> Ended | None:
    """Makes a failed trial missing again, unless some other process has taken it."""
    with store.trial_lock(trial_id).hold(patience=1.0) as ours:
        if ours and store.status(trial_id) == "failed":
            store.set_aside(trial_id)
    return ended_status(store, trial_id)
