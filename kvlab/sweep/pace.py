"""How long a sweep still takes, from the trials that have ended."""

import time

from kvlab.sweep.plan import PlannedTrial


class Pace:
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
