"""Trials that wait to be started: one queue for each kind of request, and some only later."""

import time
from collections import deque
from collections.abc import Iterator

from kvlab.spec.parts import ResourcesConfig
from kvlab.sweep.executor import Executor
from kvlab.sweep.plan import PlannedTrial


class Queues:
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


class Trainings:
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
