"""How a trial stands in the record, as a driver sees it."""

from collections.abc import Iterable
from typing import Literal

from kvlab.trial.record import Store

Ended = Literal["done", "failed", "diverged", "pruned"]


def ended_status(store: Store, trial_id: str, *, pruned: bool = False) -> Ended | None:
    """How a trial ended; None if it has not, or its result cannot be read and is made again.

    Args:
        pruned: whether one that a search has pruned counts as ended, as it does for searches
            that prune; every other sweep needs its result.
    """
    status = store.status(trial_id)
    if status == "damaged" or (status == "pruned" and not pruned):
        return None
    return status


def statuses(
    store: Store, trials: Iterable[str], forget_failures: bool, *, pruned: bool = False
) -> dict[str, Ended | None]:
    """How all of them stand, see `ended_status`; failures are forgotten first, if so asked."""
    found = {trial: ended_status(store, trial, pruned=pruned) for trial in trials}
    if forget_failures:
        failed = [trial for trial, status in found.items() if status == "failed"]
        found.update((trial, forget_failure(store, trial)) for trial in failed)
    return found


def forget_failure(store: Store, trial_id: str) -> Ended | None:
    """Makes a failed trial missing again, unless some other process has taken it."""
    with store.trial_lock(trial_id).hold(patience=1.0) as ours:
        if ours and store.status(trial_id) == "failed":
            store.set_aside(trial_id)
    return ended_status(store, trial_id)
