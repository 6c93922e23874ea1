"""Trials that wait to be started: their order, and what each of them waits for.

A trial waits for room on the executor or for its retry (`TrialQueue`), for another trial's training
(`TrainingWaitlist`), or for another process (`RemoteTrials`).
"""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kvlab.fs.lease import LeaseWatcher
from kvlab.fs.lock import Lock
from kvlab.layout import KVLayout
from kvlab.spec import ResourcesConfig
from kvlab.store import Store
from kvlab.store.attempt import StallWatch, stall_seconds
from kvlab.sweep.executors.executor import Executor
from kvlab.sweep.planning.planner import PlannedTrial, ended_status
from kvlab.trial.trial import Trial


def order_trials(trials: Sequence[PlannedTrial]) -> list[PlannedTrial]:
    """Return ``trials``, given in the design's order, in the order in which they are started.

    The baseline comes first; then one trial of every distinct architecture, so that a broken one
    is known within minutes; then a fixed shuffle, so that the results at any time represent the
    whole design. Ids are hashes, so sorting by id is a shuffle that is the same everywhere. A
    trial that trains comes before the trials that share its training, and of token budgets that
    share a stable phase the longest comes first, so that the others can branch while it goes on.
    """
    first_of_architecture: dict[str, PlannedTrial] = {}
    trainers: dict[str, PlannedTrial] = {}
    trunks: dict[str, PlannedTrial] = {}
    for planned in trials:
        first_of_architecture.setdefault(architecture_key(planned), planned)
        trainers.setdefault(planned.trial.training_id, planned)
    for planned in sorted(
        trainers.values(), key=lambda p: -p.trial.experiment.training.stable_steps
    ):
        if planned.trial.trunk_id is not None:
            trunks.setdefault(planned.trial.trunk_id, planned)
    shuffled = sorted(trials, key=lambda planned: planned.trial.id)
    ordered: dict[str, PlannedTrial] = {}
    for planned in (*first_of_architecture.values(), *shuffled):
        before = [trainers[planned.trial.training_id], planned]
        if planned.trial.trunk_id is not None:
            before.insert(0, trunks[planned.trial.trunk_id])
        for one in before:
            ordered.setdefault(one.trial.id, one)
    return list(ordered.values())


def architecture_key(planned: PlannedTrial) -> str:
    """Return a key of the model and how its K/V are stored, whatever the recipe, seed or text."""
    experiment = planned.trial.experiment
    layout = KVLayout.of(experiment.model, experiment.serving)
    serving = [str(experiment.serving.kv_dtype), layout.identity()]
    trained = experiment.training.kv.identity(experiment.model)
    return json.dumps([experiment.model.computation(), serving, trained], sort_keys=True)


def next_task(planned: PlannedTrial, store: Store) -> PlannedTrial:
    """Return a trial as the task that is next: one worker measures what several have trained."""
    trial = planned.trial
    if trial.experiment.resources.training_workers == 1:
        return planned
    is_measurement = store.is_trained(trial.training_id)
    return replace(planned, trial=replace(trial, is_measurement=is_measurement))


class TrialQueue:
    """Trials that wait for room on the executor, one queue for each request of resources.

    A request that must wait does not block the others. Measurements of what several workers have
    trained wait for trainings, until as many wait as a training has workers: a single one would
    keep the next training from a whole machine. The first does not wait, so that a mistake in what
    is measured is known early.
    """

    def __init__(self, store: Store) -> None:
        self._store, self._has_measured = store, False
        self._queues: defaultdict[ResourcesConfig, deque[PlannedTrial]] = defaultdict(deque)
        self._delayed: list[tuple[float, PlannedTrial]] = []  # by the time at which each may start

    def push(self, planned: PlannedTrial) -> None:
        planned = next_task(planned, self._store)
        self._queues[planned.trial.resources].append(planned)

    def push_front(self, *trials: PlannedTrial) -> None:
        """Put trials before all others of their request, the last argument first."""
        for planned in trials:
            planned = next_task(planned, self._store)
            self._queues[planned.trial.resources].appendleft(planned)

    def push_delayed(self, planned: PlannedTrial, seconds: float) -> None:
        """Add a trial that may start ``seconds`` from now."""
        self._delayed.append((time.monotonic() + seconds, planned))
        self._delayed.sort(key=lambda entry: entry[0])

    def pop_ready(self, executor: Executor) -> Iterator[PlannedTrial]:
        """Remove and yield the trials for which there is room.

        The caller starts each one, or puts it elsewhere, before it asks for the next.
        """
        while self._delayed and self._delayed[0][0] <= time.monotonic():
            self.push_front(self._delayed.pop(0)[1])
        has_changed = True
        while has_changed:  # what the caller does with one may put others into any queue
            has_changed = False
            for resources in sorted(self._queues, key=self._rank):
                queue = self._queues[resources]
                while queue and executor.has_room(resources):
                    has_changed = True
                    self._has_measured |= queue[0].trial.is_measurement
                    yield queue.popleft()

    def _rank(self, resources: ResourcesConfig) -> int:
        """Return 0 for the queue of a request that is served first, 2 for one that is last."""
        trial = self._queues[resources][0].trial if self._queues[resources] else None
        if trial is None or not trial.is_measurement:
            return 1
        workers = trial.experiment.resources.training_workers
        return 0 if len(self._queues[resources]) >= workers or not self._has_measured else 2

    @property
    def blocked(self) -> PlannedTrial | None:
        """A trial that could start if there were room; None if none waits for that."""
        return next((queue[0] for queue in self._queues.values() if queue), None)

    @property
    def delay(self) -> float | None:
        """Seconds until the next delayed trial may start; None if there is none."""
        return max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None


class TrainingWaitlist:
    """Which trial runs which training now, and which trials wait for it.

    A trial runs its own training, and one that it starts from if its weights are lost.
    """

    def __init__(self) -> None:
        self._trainers: dict[str, str] = {}  # training id -> id of the trial that runs it
        self._waiting: dict[str, list[PlannedTrial]] = {}

    def begin(self, training_id: str, trial: Trial) -> None:
        """Note that a trial runs a training from now on."""
        self._trainers[training_id] = trial.id

    def is_running(self, training_id: str) -> bool:
        return training_id in self._trainers

    def wait_for(self, training_id: str, planned: PlannedTrial) -> None:
        """Let a trial wait until a training has ended."""
        self._waiting.setdefault(training_id, []).append(planned)

    def end(self, planned: PlannedTrial) -> list[PlannedTrial]:
        """Note that a trial has ended; return the trials that waited for its trainings."""
        own = [one for one, trial in self._trainers.items() if trial == planned.trial.id]
        return self._release(own, planned.trial.training_id)

    def pop_trained(self, store: Store) -> list[PlannedTrial]:
        """Remove and return the trials whose training is done, while its trial still runs."""
        return self._release([one for one in self._trainers if store.is_trained(one)])

    def pop_waiting(self, training_id: str) -> list[PlannedTrial]:
        """Remove and return the trials that wait for a training, unless it runs; last first."""
        return [] if self.is_running(training_id) else self._waiting.pop(training_id, [])[::-1]

    def _release(self, ended: list[str], *others: str) -> list[PlannedTrial]:
        for one in ended:
            del self._trainers[one]
        return [p for one in dict.fromkeys((*others, *ended)) for p in self.pop_waiting(one)]


class TrunkWaitlist:
    """Trials that wait for the stable phase that a trial of another token budget trains now.

    Args:
        active: Returns the trials that run now, here or elsewhere.
    """

    def __init__(self, store: Store, active: Callable[[], Iterable[PlannedTrial]]):
        self._store, self._active = store, active
        self._waiting: list[PlannedTrial] = []

    def is_worthwhile(self, trial: Trial) -> bool:
        """Return whether a trial that waits can branch later than it could now."""
        if not trial.shared_steps or self._store.is_trained(trial.training_id):
            return False
        own = [other.trial for other in self._active() if other.trial.trunk_id == trial.trunk_id]
        if all(self._store.is_trained(other.training_id) for other in own):
            return False
        assert trial.trunk_id is not None, "it shares steps"
        stable_steps = trial.experiment.training.stable_steps
        return stable_steps not in self._store.trunk_steps(trial.trunk_id)

    def add(self, planned: PlannedTrial) -> None:
        self._waiting.append(planned)

    def pop_ready(self) -> list[PlannedTrial]:
        """Remove and return the trials that need not wait any more; last first."""
        ready = [p for p in self._waiting if not self.is_worthwhile(p.trial)]
        self._waiting = [p for p in self._waiting if p not in ready]
        return ready[::-1]


class RemoteTrials:
    """Trials that another process runs: another driver of this sweep, or of one that shares them.

    A trial stays here until its holder has ended it, has released it, or has died.
    """

    def __init__(self, store: Store, trainings: TrainingWaitlist):
        self._store, self._trainings = store, trainings
        self._watcher = LeaseWatcher()
        self._trials: dict[str, PlannedTrial] = {}
        self._stall_watches: dict[str, StallWatch] = {}
        stall_seconds()  # a wrong one is noticed before the first wait

    def __len__(self) -> int:
        """Return how many trials other processes run now. Any thread may call this."""
        return len(self._trials)

    def __iter__(self) -> Iterator[PlannedTrial]:
        return iter(list(self._trials.values()))

    def holds(self, trial: Trial) -> bool:
        """Return whether another process runs the trial, or the training that it needs."""
        if self._is_locked(self._store.trial_directory(trial.id)):
            return True
        if self._store.is_trained(trial.training_id):
            return False
        return self._is_locked(self._store.training_directory(trial.training_id))

    def add(self, planned: PlannedTrial) -> None:
        """Set a trial aside until `pop_released`; those that share its training wait for it."""
        training = planned.trial.training_id
        if not self._store.is_trained(training) and not self._trainings.is_running(training):
            self._trainings.begin(training, planned.trial)
        self._trials[planned.trial.id] = planned

    def describe_wait(self, trial: Trial) -> str:
        """Return whom a trial waits for, since when, and what ends the wait."""
        lock = self._held_lock(trial)
        is_trial = lock.path.parent.name == trial.id
        return lock.describe_wait("runs this trial" if is_trial else "runs its training")

    def check_progress(self) -> None:
        """Check that those who run trials elsewhere make progress.

        Raises:
            StoreError: One of them has made none for `kvlab.store.attempt.stall_seconds`.
        """
        for planned in self:
            trial, own = planned.trial, self._store.trial_directory(planned.trial.id)
            training = self._store.training_directory(trial.training_id)
            new = StallWatch((own, training, training / "checkpoints"))
            self._stall_watches.setdefault(trial.id, new).check(self._held_lock(trial))

    def _held_lock(self, trial: Trial) -> Lock:
        own = self._store.trial_lock(trial.id)
        is_own = self._watcher.is_held(own.path)
        return own if is_own else self._store.training_lock(trial.training_id)

    def pop_released(self) -> Iterator[tuple[PlannedTrial, list[PlannedTrial]]]:
        """Remove and yield the trials that have ended or can start here.

        Each comes with the trials that waited for its training.
        """
        for planned in list(self._trials.values()):
            has_ended = ended_status(self._store, planned.trial.id) is not None
            if has_ended or not self.holds(planned.trial):
                del self._trials[planned.trial.id]
                self._stall_watches.pop(planned.trial.id, None)
                yield planned, self._trainings.end(planned)

    def _is_locked(self, directory: Path) -> bool:
        # A worker looks once and cannot tell that a holder is gone: free its lock for it.
        return not self._watcher.free_if_abandoned(directory / "lock")
