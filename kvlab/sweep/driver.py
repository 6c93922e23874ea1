"""The driver: picks trials, starts them, classifies how they end, and records what they cannot.

One driver a sweep at a time. Its memory holds ids and states, never results: those are on disk.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvlab.errors import SourceMissing, Stopped, StoreError, UsageError
from kvlab.sweep.events import Before, Event, Summary
from kvlab.sweep.executor import Ended, Executor, WorkerKilled
from kvlab.sweep.failures import Again, Failures
from kvlab.sweep.feed import Feed
from kvlab.sweep.order import run_order
from kvlab.sweep.pausing import settle_pause
from kvlab.sweep.plan import Plan, PlannedTrial, prunes, to_run
from kvlab.sweep.queues import Queues, Trainings
from kvlab.sweep.recorded import ended_status, forget_failure
from kvlab.sweep.starts import needs_source
from kvlab.trial.origin import Origin
from kvlab.trial.provenance import now
from kvlab.trial.record import Store
from kvlab.trial.run import missing_source, record_failure

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
        on_result: called with a trial's id whenever a result has been recorded.
        retry_failed: also run the trials that failed before.
        feed: gives more trials, as a search does.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        executor: Executor,
        *,
        origin: Origin | None = None,
        description: Mapping[str, Any] | None = None,
        before: Before | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_result: Callable[[str], None] | None = None,
        retry_failed: bool = False,
        feed: Feed | None = None,
    ):
        self._plan, self._store, self._executor = plan, store, executor
        self._origin, self._description = origin or Origin(), description
        self._before, self._on_result = before, on_result or (lambda _: None)
        self._tell = on_event or (lambda _: None)
        self._retry_failed, self._feed = retry_failed, feed
        self._prunes = prunes(plan.sweep)
        self._flag, self._stopping = store.stop_flag(plan.sweep.name), False
        self._planned = {planned.trial.id: planned for planned in plan.trials}
        self._queues, self._trainings = Queues(), Trainings()
        self._running: dict[str, float] = {}  # trial id -> when it was started
        self._failures = Failures(plan.sweep.failures, store, executor)
        self._halted, self._ran = "", 0
        self._states: dict[str, str] = {}

    @property
    def running(self) -> list[PlannedTrial]:
        """The trials that are started and have not ended, the oldest first. Any thread may ask."""
        return [self._planned[trial_id] for trial_id in list(self._running)]

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop."""
        return self._stopping

    def stop(self) -> None:
        """Asks all running trials to stop at their next checkpoint, and starts no more.

        Safe in a signal handler: it prints nothing and takes no lock.
        """
        self._stopping = True
        with contextlib.suppress(FileNotFoundError):  # no folder yet: nothing runs yet
            self._flag.touch()

    def run(self) -> Summary:
        """Runs until nothing is missing, or until asked to stop.

        Raises:
            UsageError: another driver runs this sweep.
            ResourceError: a trial asks for more than there is; nothing has been started.
            StoreError: the store cannot be written; everything started has been stopped.
        """
        started, name = time.monotonic(), self._plan.sweep.name
        self._executor.check(
            {p.trial.experiment.resources for p in to_run(self._plan, self._retry_failed)}
        )
        lock = self._store.driver_lock(name)
        with lock.hold(patience=1.0) as ours:
            if not ours:
                text = f"sweep = {name} is being run by {lock.noted() or 'another process'}"
                raise UsageError(f"{text}; wait for it, or end it with `kvlab stop {name}`")
            lock.note(f"process {os.getpid()} since {now()}")
            self._flag.unlink(missing_ok=True)
            try:
                self._prepare()
                self._loop()
            except Stopped:
                pass  # while preparing: nothing runs
            except StoreError:
                self._abort()
                raise
            finally:
                self._flag.unlink(missing_ok=True)
        return self._summary(time.monotonic() - started)

    def _prepare(self) -> None:
        missing = []
        for planned in self._plan.trials:
            status = ended_status(self._store, planned.trial.id, pruned=self._prunes)
            if status == "failed" and self._retry_failed:
                status = forget_failure(self._store, planned.trial.id)
            if status is None:
                missing.append(planned)
            else:
                self._states[planned.trial.id] = status
        if self._description is not None:
            self._store.write_sweep(dict(self._description))
        if missing and self._before is not None:
            missing = list(filter(self._is_left, self._before(missing, self._check_stop)))
        for planned in run_order(missing):
            self._queues.add(planned)

    def _is_left(self, planned: PlannedTrial) -> bool:
        """Takes a trial as it was prepared; whether it is still to run."""
        self._planned[planned.trial.id] = planned
        if status := ended_status(self._store, planned.trial.id):
            self._count(planned, status, 0.0)
        return status is None

    def _check_stop(self) -> None:
        self._stopping = self._stopping or self._flag.exists()  # by a signal or `kvlab stop`
        if self._stopping:
            raise Stopped("asked to stop")

    def _loop(self) -> None:
        while True:
            with contextlib.suppress(Stopped):
                self._check_stop()
                if not self._halted:
                    self._take_more()
                    self._start_ready()
            pause = None if self._stopping or self._halted else self._queues.pause
            if self._running:
                for ended, seconds in self._wait():
                    self._handle(ended, seconds)
            elif pause is not None:
                time.sleep(min(WAIT_SECONDS, pause))
            else:
                return

    def _wait(self) -> list[tuple[Ended, float]]:
        """What has ended, and how long it ran; none of it runs any more."""
        return [
            (ended, time.monotonic() - self._running.pop(ended.trial_id))
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
                self._queues.add(planned)

    def _go_on(self, planned: PlannedTrial) -> None:
        """Queues a trial that has paused."""
        self._planned[planned.trial.id] = planned
        self._states.pop(planned.trial.id, None)
        self._queues.add(planned)

    def _start_ready(self) -> None:
        for planned in self._queues.ready(self._executor):
            training = planned.trial.training_id
            if needs_source(planned.trial, self._store):
                self._after_source(planned)
                continue
            if self._trainings.runs(training):
                self._trainings.wait_for(training, planned)
                continue
            if not self._store.training_done(training):
                self._trainings.begin(planned)
            self._running[planned.trial.id] = time.monotonic()
            self._tell(Event("started", planned))
            self._executor.start(planned.trial)

    def _after_source(self, planned: PlannedTrial) -> None:
        """Lets a trial wait for the training that it starts from, or fails it if none comes."""
        assert planned.trial.source is not None, "asked for by `needs_source`"
        source = planned.trial.source.training_id
        coming = (p.trial for p in self._plan.trials if p.trial.id not in self._states)
        if any(trial.training_id == source for trial in coming):
            self._trainings.wait_for(source, planned)
            return
        error = SourceMissing(missing_source(planned.trial, self._store))
        self._handle(Ended(planned.trial.id, error=error), 0.0)

    def _ended(self, planned: PlannedTrial, status: str, seconds: float) -> None:
        again = self._failures.failed(planned) if status == "failed" else None
        if again is not None and forget_failure(self._store, planned.trial.id) is None:
            self._again(again)
            return
        why = self._failures.hopeless(planned) if status == "failed" else None
        self._count(planned, status, seconds)
        self._queues.add_first(self._trainings.released(planned.trial.training_id))
        if why and not self._halted:
            self._halted = why
            self._tell(Event("halted", planned, message=why))

    def _count(self, planned: PlannedTrial, status: str, seconds: float) -> None:
        self._states[planned.trial.id] = status
        self._ran += 1
        if self._feed is not None and status != "pruned":
            self._feed.ended(planned, status)
        self._on_result(planned.trial.id)
        self._tell(Event("ended", planned, status, seconds))

    def _again(self, again: Again) -> None:
        self._planned[again.planned.trial.id] = again.planned
        self._queues.add_later(again.planned, again.seconds)
        self._tell(Event("retried", again.planned, message=again.why))

    def _handle(self, ended: Ended, seconds: float) -> None:
        planned = self._planned[ended.trial_id]
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
        elif status is None and ended.outcome != "stopped":
            text = f"trial {ended.trial_id} ended as {ended.outcome}, and {self._store.path} has"
            raise StoreError(f"{text} no result; workers and driver must share the store")
        if status is not None:
            self._ended(planned, status, seconds)
        elif ended.outcome in ("paused", "stopped"):
            self._tell(Event("ended", planned, ended.outcome, seconds))
            stopped = ended.outcome == "stopped"
            if stopped and not self._stopping and not self._flag.exists():
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
        self._stopping = True
        with contextlib.suppress(OSError):  # no room for it: the executor's closing ends them
            self._flag.touch()
            while self._running:
                self._wait()

    def _summary(self, seconds: float) -> Summary:
        states = Counter(self._states.values())
        states["missing"] = len(self._planned) - states.total()
        return Summary(states, self._ran, seconds, self._stopping, self._halted)
