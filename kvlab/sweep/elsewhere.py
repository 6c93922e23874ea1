"""Trials that another process has now: another driver of this sweep, or of one that shares them."""

from collections.abc import Iterator
from pathlib import Path

from kvlab.lock import is_held
from kvlab.sweep.plan import PlannedTrial
from kvlab.sweep.queues import Trainings
from kvlab.sweep.recorded import ended_status
from kvlab.trial.record import Store
from kvlab.trial.trial import Trial


class Elsewhere:
    """What is set aside until its holder has ended it, or has let go of it, or is gone."""

    def __init__(self, store: Store, trainings: Trainings):
        self._store, self._trainings = store, trainings
        self._aside: dict[str, PlannedTrial] = {}

    def __len__(self) -> int:
        """How many other processes have now. Any thread may ask."""
        return len(self._aside)

    def has(self, trial: Trial) -> bool:
        """Whether another process has the trial, or the training that it needs."""
        if _is_held(self._store.trial_directory(trial.id)):
            return True
        if self._store.training_done(trial.training_id):
            return False
        return _is_held(self._store.training_directory(trial.training_id))

    def takes(self, planned: PlannedTrial) -> bool:
        """Sets a trial aside if another process has it."""
        taken = self.has(planned.trial)
        if taken:
            self.set_aside(planned)
        return taken

    def set_aside(self, planned: PlannedTrial) -> None:
        """Until `back`; those that share a training which runs there wait here for it."""
        training = planned.trial.training_id
        if not self._trainings.runs(training) and not self._store.training_done(training):
            self._trainings.begin(planned)
        self._aside[planned.trial.id] = planned

    def back(self) -> Iterator[tuple[PlannedTrial, list[PlannedTrial]]]:
        """Those that have ended or can be started here now, each with those that waited for it."""
        for planned in list(self._aside.values()):
            ended = ended_status(self._store, planned.trial.id) is not None
            if ended or not self.has(planned.trial):
                del self._aside[planned.trial.id]
                yield planned, self._trainings.end(planned)


def _is_held(directory: Path) -> bool:
    return is_held(directory / "lock")
