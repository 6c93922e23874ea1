"""How fast a sweep goes and how long it still takes, from the record alone, whoever drives it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import mean
from typing import Any

from kvlab.errors import StoreError
from kvlab.trial.record import Store

MOST_READ = 64
"""Results that a rate is made from, the ones that ended last: a store may hold thousands."""


@dataclass(frozen=True)
class Outlook:
    """What is known of a sweep's pace.

    Attributes:
        tokens_per_second: of all trainings that run now, together; None if none reports.
        trials_per_hour: as the trials that run now go, if there are any and some have ended.
        seconds_left: at that pace; None if nothing runs or nothing has ended yet.
    """

    tokens_per_second: float | None
    trials_per_hour: float | None
    seconds_left: float | None


def outlook(store: Store, done: Iterable[str], running: Sequence[str], missing: int) -> Outlook:
    """The pace of a sweep.

    Args:
        done: ids of its finished trials.
        running: ids of those that run now.
        missing: how many more are to run.
    """
    progress = [store.progress(trial) or {} for trial in running]
    rates = [state["tokens_per_second"] for state in progress if state.get("tokens_per_second")]
    tokens = float(sum(rates)) if rates else None
    durations = list(_durations(store, done))
    if not durations or not running:
        return Outlook(tokens, None, None)
    each = mean(durations)
    rest = [min(state.get("seconds_left") or each / 2, each) for state in progress]
    seconds = (missing * each + sum(rest)) / len(running)
    return Outlook(tokens, len(running) * 3600 / each, seconds)


def _durations(store: Store, done: Iterable[str]) -> Iterable[float]:
    """Seconds that each of the newest finished trials took, from one start to its end."""
    newest = sorted(done, key=lambda trial: _moment(store, trial), reverse=True)
    for trial in newest[:MOST_READ]:
        try:
            result = store.result(trial)
        except StoreError:
            continue
        if result is not None:
            yield _seconds(result)


def _seconds(result: dict[str, Any]) -> float:
    """Of the last attempt, and of what an earlier one trained for it."""
    facts, record = result["provenance"], result["training_record"] or {}
    ends = [datetime.fromisoformat(facts[key]) for key in ("started", "finished")]
    last = max(1.0, (ends[1] - ends[0]).total_seconds())
    return max(last, record.get("seconds", 0.0)) if facts["attempts"] > 1 else last


def _moment(store: Store, trial: str) -> float:
    try:
        return (store.trial_directory(trial) / "result.json").stat().st_mtime
    except OSError:
        return 0.0
