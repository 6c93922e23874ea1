"""In which order trials are started.

The baseline first; then one trial of every distinct architecture, so that a broken one is known
in the first minutes; then a fixed shuffle, so that what has ended at any time says something
about the whole design. Ids are hashes: their order is a shuffle, and the same everywhere.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvlab.errors import ResourceError
from kvlab.fs.lease import LeaseWatcher
from kvlab.layout import KVLayout
from kvlab.spec import ResourcesConfig
from kvlab.store import Store
from kvlab.sweep.driver.events import Event
from kvlab.sweep.executors.executor import Executor
from kvlab.sweep.planning.planner import PlannedTrial, ended_status
from kvlab.trial.trial import Trial


def order_trials(trials: Sequence[PlannedTrial]) -> list[PlannedTrial]:
    """``trials``, which are in the design's order, as they are to be started.

    The trial that the plan counts as the trainer of some weights comes before those that share
    them.
    """
    early: dict[str, PlannedTrial] = {}
    for planned in trials:
        early.setdefault(architecture_key(planned), planned)
    first = {planned.trial.id for planned in early.values()}
    rest = [planned for planned in trials if planned.trial.id not in first]
    shuffled = [*early.values(), *sorted(rest, key=lambda planned: planned.trial.id)]
    leaders: dict[str, PlannedTrial] = {}
    for planned in trials:
        leaders.setdefault(planned.trial.training_id, planned)
    ordered: dict[str, PlannedTrial] = {}
    for planned in shuffled:
        leader = leaders[planned.trial.training_id]
        ordered.setdefault(leader.trial.id, leader)
        ordered.setdefault(planned.trial.id, planned)
    return list(ordered.values())


def architecture_key(planned: PlannedTrial) -> str:
    """What is built and how it is served; not the recipe, the seed or the text."""
    experiment = planned.trial.experiment
    layout = KVLayout.of(experiment.model, experiment.serving)
    served = [layout.owners, layout.writers, layout.kv_dtype]
    return json.dumps([experiment.model.computation(), served], sort_keys=True)


# Trials that wait to be started: one queue for each kind of request, and some only later.


class TrialQueue:
    """In order within a kind of request, so that one which must wait does not block others."""

    def __init__(self) -> None:
        self._queues: dict[ResourcesConfig, deque[PlannedTrial]] = {}
        self._later: list[tuple[float, PlannedTrial]] = []  # when it may start, the first first

    def add(self, planned: PlannedTrial, *, first: bool = False) -> None:
        queue = self._queues.setdefault(planned.trial.experiment.resources, deque())
        (queue.appendleft if first else queue.append)(planned)

    def add_first(self, waiting: list[PlannedTrial]) -> None:
        """The last of them comes first."""
        for planned in waiting:
            self.add(planned, first=True)

    def add_later(self, planned: PlannedTrial, seconds: float) -> None:
        self._later.append((time.monotonic() + seconds, planned))
        self._later.sort(key=lambda entry: entry[0])

    def ready(self, executor: Executor) -> Iterator[PlannedTrial]:
        """Takes out what can start; the caller starts each before it asks for the next."""
        while self._later and self._later[0][0] <= time.monotonic():
            self.add(self._later.pop(0)[1], first=True)
        moved = True
        while moved:  # what the caller does with one may put others into any queue
            moved = False
            for resources, queue in list(self._queues.items()):
                while queue and executor.has_room(resources):
                    moved = True
                    yield queue.popleft()

    @property
    def first(self) -> PlannedTrial | None:
        """One that could start if there were room; None if none waits for that."""
        return next((queue[0] for queue in self._queues.values() if queue), None)

    @property
    def pause(self) -> float | None:
        """Seconds until one that starts later may; None if there is none."""
        return max(0.0, self._later[0][0] - time.monotonic()) if self._later else None


class TrainingWaitlist:
    """Which trial trains what now, and which trials wait until it has."""

    def __init__(self) -> None:
        self._trainers: dict[str, str] = {}  # training id -> the trial that runs it now
        self._waiting: dict[str, list[PlannedTrial]] = {}

    def begin(self, planned: PlannedTrial) -> None:
        self._trainers[planned.trial.training_id] = planned.trial.id

    def runs(self, training: str) -> bool:
        return training in self._trainers

    def wait_for(self, training: str, planned: PlannedTrial) -> None:
        self._waiting.setdefault(training, []).append(planned)

    def end(self, planned: PlannedTrial) -> list[PlannedTrial]:
        """Notes that a trial has ended; gives those that waited for it, last first."""
        training = planned.trial.training_id
        if self._trainers.get(training) == planned.trial.id:
            del self._trainers[training]
        return self.released(training)

    def released(self, training: str) -> list[PlannedTrial]:
        """Those that wait for a training, unless it runs; last first."""
        return [] if self.runs(training) else self._waiting.pop(training, [])[::-1]


# Trials that another process has now: another driver of this sweep, or of one that shares them.


class RemoteTrials:
    """What is set aside until its holder has ended it, or has let go of it, or is gone."""

    def __init__(self, store: Store, trainings: TrainingWaitlist):
        self._store, self._trainings = store, trainings
        self._watcher = LeaseWatcher()
        self._aside: dict[str, PlannedTrial] = {}

    def __len__(self) -> int:
        """How many other processes have now. Any thread may ask."""
        return len(self._aside)

    def has(self, trial: Trial) -> bool:
        """Whether another process has the trial, or the training that it needs."""
        if self._is_held(self._store.trial_directory(trial.id)):
            return True
        if self._store.is_trained(trial.training_id):
            return False
        return self._is_held(self._store.training_directory(trial.training_id))

    def takes(self, planned: PlannedTrial) -> bool:
        """Sets a trial aside if another process has it."""
        taken = self.has(planned.trial)
        if taken:
            self.set_aside(planned)
        return taken

    def set_aside(self, planned: PlannedTrial) -> None:
        """Until `back`; those that share a training which runs there wait here for it."""
        training = planned.trial.training_id
        if not self._trainings.runs(training) and not self._store.is_trained(training):
            self._trainings.begin(planned)
        self._aside[planned.trial.id] = planned

    def back(self) -> Iterator[tuple[PlannedTrial, list[PlannedTrial]]]:
        """Those that have ended or can be started here now, each with those that waited for it."""
        for planned in list(self._aside.values()):
            ended = ended_status(self._store, planned.trial.id) is not None
            if ended or not self.has(planned.trial):
                del self._aside[planned.trial.id]
                yield planned, self._trainings.end(planned)

    def _is_held(self, directory: Path) -> bool:
        # A worker looks once and cannot tell that a holder is gone: free its lock for it.
        return not self._watcher.free_if_abandoned(directory / "lock")


# Room for trials: what can never be met is refused, and what waits for room says so.


class Admission:
    """What one driver has asked its executor for.

    Args:
        executor: where the trials run.
        tell: takes events for those who watch.
    """

    def __init__(self, executor: Executor, tell: Callable[[Event], None]):
        self._executor, self._tell = executor, tell
        self._checked: set[ResourcesConfig] = set()
        self._told: set[ResourcesConfig] = set()

    def check(self, *planned: PlannedTrial) -> None:
        """Raises ResourceError if one asks for more than there is; each request is asked once."""
        asked = {one.trial.experiment.resources for one in planned} - self._checked
        self._executor.check(asked)
        self._checked |= asked

    def tell_waiting(self, planned: PlannedTrial) -> None:
        """Tells once of each request that nothing runs and there still is no room for it, as
        where a machine has left the cluster."""
        resources = planned.trial.experiment.resources
        if resources in self._told:
            return
        self._told.add(resources)
        try:
            self._executor.check({resources})
            text = "others have what it asks for; it starts when there is room"
        except ResourceError as error:
            text = f"{error}; it starts should one come"
        self._tell(Event("waiting", planned, message=text))
