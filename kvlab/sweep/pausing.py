"""What becomes of a trial that has paused at a rung: the feed decides, the driver records."""

from kvlab.sweep.feed import Feed
from kvlab.sweep.plan import PlannedTrial
from kvlab.sweep.recorded import ended_status
from kvlab.trial.origin import Origin
from kvlab.trial.pruned import record_pruned
from kvlab.trial.record import Store


def settle_pause(
    feed: Feed | None, planned: PlannedTrial, store: Store, origin: Origin
) -> tuple[str | None, PlannedTrial]:
    """Asks the feed about a trial, and records it as pruned if it does not go on.

    Returns:
        How it has ended, None if it is to be queued again; and the trial as it then goes on. It
        is queued also where some other process runs it after all: to wait for that one.
    """
    assert feed is not None, "only the trials of a feed pause"
    further = feed.paused(planned)
    if further is None and record_pruned(planned.trial, store, origin):
        return "pruned", planned
    return ended_status(store, planned.trial.id), further or planned
