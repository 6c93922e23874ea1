"""How fast a sweep goes and how long it still takes, from the record alone, whoever drives it."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import mean
from typing import Any

from kvlab.errors import StoreError
from kvlab.store import Store
from kvlab.sweep.planning.planner import PlannedTrial

MAX_RESULTS_READ = 64
"""Results that a rate is made from, the ones that ended last: a store may hold thousands."""


@dataclass(frozen=True)
class SweepPace:
    """What is known of a sweep's pace.

    Attributes:
        tokens_per_second: of all trainings that run now, together; None if none reports.
        trials_per_hour: as the trials that run now go, if there are any and some have ended.
        seconds_left: at that pace; None if nothing runs or nothing has ended yet.
    """

    tokens_per_second: float | None
    trials_per_hour: float | None
    seconds_left: float | None


def estimate_pace(
    store: Store, done: Iterable[str], running: Sequence[str], missing: int
) -> SweepPace:
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
        return SweepPace(tokens, None, None)
    each = mean(durations)
    rest = [min(state.get("seconds_left") or each / 2, each) for state in progress]
    seconds = (missing * each + sum(rest)) / len(running)
    return SweepPace(tokens, len(running) * 3600 / each, seconds)


def _durations(store: Store, done: Iterable[str]) -> Iterable[float]:
    """Seconds that each of the newest finished trials took, from one start to its end."""
    newest = sorted(done, key=lambda trial: _ended_at(store, trial), reverse=True)
    for trial in newest[:MAX_RESULTS_READ]:
        try:
            result = store.result(trial)
        except StoreError:
            continue
        if result is not None:
            yield _trial_seconds(result)


def _trial_seconds(result: dict[str, Any]) -> float:
    """Of the last attempt, and of what an earlier one trained for it."""
    facts, record = result["provenance"], result["training_record"] or {}
    ends = [datetime.fromisoformat(facts[key]) for key in ("started", "finished")]
    last = max(1.0, (ends[1] - ends[0]).total_seconds())
    return max(last, record.get("seconds", 0.0)) if facts["attempts"] > 1 else last


def _ended_at(store: Store, trial: str) -> float:
    try:
        return (store.trial_directory(trial) / "result.json").stat().st_mtime
    except OSError:
        return 0.0


# How long a sweep still takes, from the trials that have ended.


class RemainingTime:
    """Mean durations, apart for trials that train and trials that only measure."""

    def __init__(self, missing: list[PlannedTrial]):
        self._missing = {planned.trial.id: planned for planned in missing}
        self._started: dict[str, float] = {}
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def started(self, planned: PlannedTrial) -> None:
        self._started[planned.trial.id] = time.monotonic()

    def dropped(self, planned: PlannedTrial) -> None:
        """A trial that does not run here after all."""
        self._started.pop(planned.trial.id, None)

    def ended(self, planned: PlannedTrial, seconds: float | None) -> None:
        """``seconds`` is None if it ran elsewhere, in nobody knows how long."""
        self.dropped(planned)
        missing = self._missing.pop(planned.trial.id, None)
        if missing is not None and seconds is not None:
            self._seconds[planned.trains].append(seconds)

    def seconds_left(self) -> float | None:
        """None until a first trial has ended."""
        if not any(self._seconds.values()) or not self._missing:
            return None
        moment = time.monotonic()
        work = 0.0
        for trial_id, planned in list(self._missing.items()):
            spent = moment - self._started.get(trial_id, moment)
            work += max(0.0, self._mean(planned.trains) - spent)
        return work / max(1, len(self._started))

    def _mean(self, trains: bool) -> float:
        durations = self._seconds[trains] or self._seconds[not trains]
        return sum(durations) / len(durations)
