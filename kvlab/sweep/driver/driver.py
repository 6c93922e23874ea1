"""The contract of what gives a driver more trials while it runs: a search."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvlab.errors import ResourceError, SourceMissing, Stopped, StoreError
from kvlab.store import Store
from kvlab.store.provenance import Origin
from kvlab.sweep.driver.driver_registry import join_sweep
from kvlab.sweep.driver.events import Event, PrepareTrials, Summary
from kvlab.sweep.driver.retry_policy import Retry, RetryPolicy
from kvlab.sweep.driver.shutdown import StopRequest
from kvlab.sweep.driver.trial_queue import (
    Admission,
    RemoteTrials,
    TrainingWaitlist,
    TrialQueue,
    order_trials,
)
from kvlab.sweep.executors.executor import EndedTask, Executor, WorkerKilled
from kvlab.sweep.planning.planner import (
    Plan,
    PlannedTrial,
    ended_status,
    ended_statuses,
    forget_failure,
    trials_to_run,
    uses_pruning,
)
from kvlab.trial.finalize import record_failure, record_pruned
from kvlab.trial.initial_weights import explain_missing_source, is_source_missing


class TrialSource(Protocol):
    """Asked for trials and told how they end, by the driver's thread alone.

    Attributes:
        ended_because: why there will be no more; empty as long as there may.
    """

    ended_because: str

    def next(self) -> PlannedTrial | None:
        """One more trial, which may have ended before; None if there is none for now."""
        ...

    def ended(self, planned: PlannedTrial, status: str) -> None:
        """Takes how one of its trials ended; those that are not its own are passed over."""
        ...

    def paused(self, planned: PlannedTrial) -> PlannedTrial | None:
        """Takes that one has reached the step at which it was to pause.

        Returns:
            The trial with its next ``until``, to go on; None if it is pruned for now. `next` may
            give it again.
        """
        ...


# What becomes of a trial that has paused at a rung: the feed decides, the driver records.


def settle_pause(
    feed: TrialSource | None, planned: PlannedTrial, store: Store, origin: Origin
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


# The driver: picks trials, starts them, classifies how they end, and records what they cannot.
#
# Several drivers of one sweep share the work: a trial that another has is waited for, and its end
# is read from the record. Memory holds ids and states, never results: those are on disk.


WAIT_SECONDS = 0.5


class Driver:
    """Runs the missing trials of one plan.

    Args:
        plan: what the sweep needs.
        store: where it is recorded.
        executor: where it runs; the caller closes it.
        origin: of this run, for failures that the driver records itself.
        description: of the sweep, for ``sweep.json``.
        before: called with the missing trials before the first starts.
        on_event: told of every start and end.
        on_result: called with a trial's id whenever a trial that ran here has been recorded.
        retry_failed: also run the trials that failed before.
        feed: gives more trials, as a search does; then it must be the only driver.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        executor: Executor,
        *,
        origin: Origin | None = None,
        description: Mapping[str, Any] | None = None,
        before: PrepareTrials | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_result: Callable[[str], None] | None = None,
        retry_failed: bool = False,
        feed: TrialSource | None = None,
    ):
        self._plan, self._store, self._executor = plan, store, executor
        self._origin, self._description = origin or Origin(), description
        self._before, self._on_result = before, on_result or (lambda _: None)
        self._tell = on_event or (lambda _: None)
        self._retry_failed, self._feed = retry_failed, feed
        self._prunes = uses_pruning(plan.sweep)
        self._stop = StopRequest(store, plan.sweep.name, self._origin)
        self._planned = {planned.trial.id: planned for planned in plan.trials}
        self._queues, self._trainings = TrialQueue(), TrainingWaitlist()
        self.elsewhere = RemoteTrials(store, self._trainings)
        self._running: dict[str, float] = {}  # trial id -> when it was started
        self._failures = RetryPolicy(plan.sweep.failures, store, executor)
        self._halted, self._ran = "", 0
        self._room = Admission(executor, self._tell)
        self._states: dict[str, str] = {}

    @property
    def running(self) -> list[PlannedTrial]:
        """The trials that are started and have not ended, the oldest first. Any thread may ask."""
        return [self._planned[trial_id] for trial_id in list(self._running)]

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop."""
        return self._stop.noticed

    def stop(self) -> None:
        """Asks all running trials to stop at their next checkpoint, and starts no more.

        Safe in a signal handler: it prints nothing and takes no lock.
        """
        self._stop.ask()

    def run(self) -> Summary:
        """Runs until nothing is missing, or until asked to stop.

        Raises:
            UsageError: other drivers run this sweep, and this one cannot join them.
            ResourceError: a trial asks for more than there is; nothing has been started.
            StoreError: the store cannot be written; everything started has been stopped.
        """
        started, name = time.monotonic(), self._plan.sweep.name
        self._room.check(*trials_to_run(self._plan, self._retry_failed))
        with join_sweep(self._store, name, self._description, alone=self._feed is not None):
            try:
                self._prepare()
                self._loop()
            except Stopped:
                pass  # while preparing: nothing runs
            except (StoreError, ResourceError):
                self._abort()
                raise
            finally:
                self._stop.withdraw()
        return self._summary(time.monotonic() - started)

    def _prepare(self) -> None:
        found = ended_statuses(self._store, self._planned, self._retry_failed, pruned=self._prunes)
        self._states.update((trial, status) for trial, status in found.items() if status)
        missing = [one for one in self._plan.trials if found[one.trial.id] is None]
        if missing and self._before is not None:
            missing = list(filter(self._is_left, self._before(missing, self._stop.check)))
        for planned in order_trials(missing):
            self._queues.add(planned)

    def _is_left(self, planned: PlannedTrial) -> bool:
        """Takes a trial as it was prepared; whether it is still to run."""
        self._planned[planned.trial.id] = planned
        if status := ended_status(self._store, planned.trial.id):
            self._count(planned, status, 0.0)
        return status is None

    def _loop(self) -> None:
        while True:
            with contextlib.suppress(Stopped):
                self._stop.check()
                if not self._halted:
                    self._take_more()
                    self._take_back()
                    self._start_ready()
            if self._running:
                for ended, seconds in self._wait():
                    self._handle(ended, seconds)
            elif not self.stopping and not self._halted and (pause := self._pause()) is not None:
                time.sleep(min(WAIT_SECONDS, pause))
            else:
                return

    def _pause(self) -> float | None:
        """Seconds to wait while nothing runs here; None if there is nothing to wait for."""
        if self._queues.first is not None:
            self._room.tell_waiting(self._queues.first)
        elif not len(self.elsewhere):
            return self._queues.pause
        return WAIT_SECONDS

    def _wait(self) -> list[tuple[EndedTask, float]]:
        """What has ended, and how long it ran; none of it runs any more."""
        return [
            (ended, time.monotonic() - self._running.pop(ended.task_id))
            for ended in self._executor.wait(WAIT_SECONDS)
        ]

    def _take_more(self) -> None:
        """Takes what the feed has; a trial that has ended before is told back at once."""
        while self._feed is not None and (planned := self._feed.next()) is not None:
            known = planned.trial.id in self._planned
            self._planned.setdefault(planned.trial.id, planned)
            status = ended_status(self._store, planned.trial.id, pruned=self._prunes)
            if status == "pruned":  # it is wanted further
                self._go_on(planned)
            elif status is not None:
                self._states[planned.trial.id] = status
                self._feed.ended(planned, status)
            elif not known:
                self._room.check(planned)
                self._queues.add(planned)

    def _go_on(self, planned: PlannedTrial) -> None:
        """Queues a trial that has paused."""
        self._planned[planned.trial.id] = planned
        self._states.pop(planned.trial.id, None)
        self._queues.add(planned)

    def _take_back(self) -> None:
        """What other processes have ended or let go of, and what waited for that."""
        for planned, waiting in self.elsewhere.back():
            self._queues.add_first(waiting)
            if not self._has_ended(planned):
                self._queues.add(planned, first=True)

    def _has_ended(self, planned: PlannedTrial) -> bool:
        """Whether another process has ended it meanwhile; then it is counted."""
        status = ended_status(self._store, planned.trial.id)
        if status is not None:
            self._ended(planned, status, None)
        return status is not None

    def _start_ready(self) -> None:
        for planned in self._queues.ready(self._executor):
            training = planned.trial.training_id
            if self._has_ended(planned):
                continue
            if is_source_missing(planned.trial, self._store):
                self._after_source(planned)
                continue
            if self._trainings.runs(training):
                self._trainings.wait_for(training, planned)
                continue
            if self.elsewhere.takes(planned):
                continue
            if not self._store.is_trained(training):
                self._trainings.begin(planned)
            self._running[planned.trial.id] = time.monotonic()
            self._tell(Event("started", planned))
            self._executor.start(planned.trial)

    def _after_source(self, planned: PlannedTrial) -> None:
        """Lets a trial wait for the training that it starts from, or fails it if none comes."""
        assert planned.trial.source_training is not None, "asked for by `is_source_missing`"
        source = planned.trial.source_training.training_id
        coming = (p.trial for p in self._plan.trials if p.trial.id not in self._states)
        if any(trial.training_id == source for trial in coming):
            self._trainings.wait_for(source, planned)
            return
        error = SourceMissing(explain_missing_source(planned.trial, self._store))
        self._handle(EndedTask(planned.trial.id, error=error), 0.0)

    def _ended(self, planned: PlannedTrial, status: str, seconds: float | None) -> None:
        """Counts a trial that has ended; ``seconds`` are None if it ran elsewhere."""
        ours = seconds is not None
        again = self._failures.failed(planned) if ours and status == "failed" else None
        if again is not None and forget_failure(self._store, planned.trial.id) is None:
            self._again(again)
            return
        why = self._failures.hopeless(planned) if status == "failed" else None
        self._count(planned, status, seconds)
        self._queues.add_first(self._trainings.released(planned.trial.training_id))
        if why and not self._halted:
            self._halted = why
            self._tell(Event("halted", planned, message=why))

    def _count(self, planned: PlannedTrial, status: str, seconds: float | None) -> None:
        ours = seconds is not None
        self._states[planned.trial.id] = status
        self._ran += ours
        if self._feed is not None and status != "pruned":
            self._feed.ended(planned, status)
        if ours:
            self._on_result(planned.trial.id)
        self._tell(Event("ended", planned, status, seconds or 0.0, elsewhere=not ours))

    def _again(self, again: Retry) -> None:
        self._planned[again.planned.trial.id] = again.planned
        self._queues.add_later(again.planned, again.seconds)
        self._tell(Event("retried", again.planned, message=again.why))

    def _handle(self, ended: EndedTask, seconds: float) -> None:
        planned = self._planned[ended.task_id]
        self._queues.add_first(self._trainings.end(planned))
        if isinstance(ended.error, StoreError):
            raise ended.error
        status: str | None = ended_status(self._store, planned.trial.id)
        if status is None and ended.error is not None:
            status = self._failed(planned, ended.error)
        elif status is None and ended.outcome == "paused":
            status, planned = settle_pause(self._feed, planned, self._store, self._origin)
            if status is None:
                self._go_on(planned)
        elif status is None and ended.outcome not in ("stopped", "elsewhere"):
            text = f"trial {ended.task_id} ended as {ended.outcome}, and {self._store.path} has"
            raise StoreError(f"{text} no result; workers and driver must share the store")
        if status is not None:
            self._ended(planned, status, seconds)
        elif ended.outcome == "elsewhere":
            self._tell(Event("ended", planned, "elsewhere", seconds))
            self.elsewhere.set_aside(planned)
        elif ended.outcome in ("paused", "stopped"):
            self._tell(Event("ended", planned, ended.outcome, seconds))
            if ended.outcome == "stopped" and not self.stopping and not self._stop.is_asked():
                self._queues.add(planned, first=True)  # by a flag that is gone again

    def _failed(self, planned: PlannedTrial, error: BaseException) -> str | None:
        """Queues a killed trial again, or records why there will be no result."""
        trial = planned.trial
        if isinstance(error, WorkerKilled):
            again = self._failures.killed(planned, error)
            if again is not None:
                self._again(again)
                return None
        failure = self._failures.lasting(planned, error)
        if not record_failure(trial, self._store, self._origin, failure):
            status = ended_status(self._store, planned.trial.id)
            if status is None:  # some other process runs it after all: wait for that one
                self._queues.add(planned, first=True)
            return status
        return "failed"

    def _abort(self) -> None:
        """Stops what runs, as far as the store lets us ask."""
        with contextlib.suppress(OSError):  # no room for it: the executor's closing ends them
            self._stop.ask()
            while self._running:
                self._wait()

    def _summary(self, seconds: float) -> Summary:
        # of what failed elsewhere, something may have been tried again there
        failed = [trial for trial, status in self._states.items() if status == "failed"]
        again = ended_statuses(self._store, failed, False)
        states = Counter(filter(None, {**self._states, **again}.values()))
        states["missing"] = len(self._planned) - states.total()
        more = self._feed is not None and not self._feed.ended_because
        return Summary(states, self._ran, seconds, self.stopping, self._halted, more)
