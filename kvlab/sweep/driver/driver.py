"""The driver: start the missing trials of a sweep, classify how they end, retry or record.

Several drivers of one sweep share the work. A trial that another driver runs is waited for, and its
end is read from the record. The driver keeps ids and states in memory, never results.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from kvlab.errors import CodeChanged, ResourceError, SourceMissing, Stopped, StoreError
from kvlab.store import Store
from kvlab.store.provenance import Origin
from kvlab.sweep.driver import trial_queue as queues
from kvlab.sweep.driver.driver_registry import StopRequest, join_sweep
from kvlab.sweep.driver.retry_policy import Retry, RetryPolicy, forget_failure
from kvlab.sweep.driver.sweep_progress import NOT_OVER, Event, PrepareTrials, Summary, TrialSource
from kvlab.sweep.executors.executor import EndedTask, Executor
from kvlab.sweep.planning import planner
from kvlab.sweep.planning.planner import Plan, PlannedTrial, Stage, ended_status
from kvlab.trial import finalize, initial_weights
from kvlab.trial.initial_weights import TrainedWeights

WAIT_SECONDS = 0.5


@dataclass(kw_only=True)
class Driver:
    """Run the missing trials of one plan.

    Args:
        executor: Where the trials run. The caller closes it.
        origin: Provenance of this run, for failures that the driver records itself.
        stop_flag: File that asks this driver's trials to stop. By default the sweep's, which asks
            the trials of all drivers.
        description: Of the sweep, written to ``sweep.json``.
        prepare: Called with the missing trials before the first one starts.
        on_event: Called with every event, such as the start and the end of a trial.
        on_result: Called with the id of every trial that ran here and has been recorded.
        retry_failed: Run the trials that failed before, too.
        source: Supplies more trials, as a search does. Then this must be the only driver.

    Attributes:
        remote_trials: The trials that other processes run.
    """

    plan: Plan = field(kw_only=False)
    store: Store = field(kw_only=False)
    executor: Executor = field(kw_only=False)
    origin: Origin = field(default_factory=Origin)
    stop_flag: Path | None = None
    description: Mapping[str, Any] | None = None
    prepare: PrepareTrials | None = None
    on_event: Callable[[Event], None] = lambda _: None
    on_result: Callable[[str], None] = lambda _: None
    retry_failed: bool = False
    source: TrialSource | None = None

    def __post_init__(self) -> None:
        plan, store = self.plan, self.store
        self._trials = {planned.trial.id: planned for planned in plan.trials}
        self._states: dict[str, str] = {}  # trial id -> how it has ended
        self._running: dict[str, float] = {}  # trial id -> when it was started
        self._queue, self._trainings = queues.TrialQueue(store), queues.TrainingWaitlist()
        self.remote_trials = queues.RemoteTrials(store, self._trainings)
        self._trunks = queues.TrunkWaitlist(
            store, lambda: [*self.running_trials, *self.remote_trials]
        )
        self._retry_policy = RetryPolicy(plan.sweep.failures, store, self.executor)
        self._stop_request = StopRequest(store, plan.sweep.name, self.stop_flag)
        self._halt_reason, self._trials_run = "", 0
        self._said: set[str] = set()  # messages of events that are not repeated

    @property
    def running_trials(self) -> list[PlannedTrial]:
        """The trials that run on the executor, the oldest first. Any thread may read it."""
        return [self._trials[trial_id] for trial_id in list(self._running)]

    @property
    def is_stopping(self) -> bool:
        """Whether the driver has been asked to stop."""
        return self._stop_request.is_noticed

    def count_states(self) -> Counter[str]:
        """Return the number of trials by how they have ended; the others are ``missing``.

        Any thread may call this.
        """
        states = Counter(list(self._states.values()))
        states["missing"] = len(self._trials) - states.total()
        return states

    def stop(self) -> None:
        """Ask all running trials to stop at their next checkpoint, and start no more.

        Safe in a signal handler: it prints nothing and takes no lock.
        """
        self._stop_request.request()

    def run(self) -> Summary:
        """Run until no trial is missing, or until asked to stop.

        Raises:
            UsageError: Other drivers run this sweep, and this one cannot join them.
            ResourceError: A trial asks for more than there is; nothing has been started.
            StoreError: The store cannot be written; everything that ran has been stopped.
        """
        sweep = self.plan.sweep.name
        missing = planner.trials_to_run(self.plan, self.retry_failed)
        tasks = (queues.next_task(planned, self.store) for planned in missing)
        self.executor.check_requests({planned.trial.resources for planned in tasks})
        exclusive = self.source is not None
        with join_sweep(self.store, sweep, self.description, exclusive=exclusive):
            try:
                self._queue_missing_trials()
                self._run_until_done()
            except Stopped:
                pass  # during the preparation: nothing runs
            except (StoreError, ResourceError):
                # stop what runs, as far as the store still lets us ask for it
                with contextlib.suppress(OSError):  # else closing the executor ends them
                    self._stop_request.request()
                    while self._running:
                        self._wait_for_trials()
                raise
            finally:
                self._stop_request.withdraw()
        return self._summarize()

    def _run_until_done(self) -> None:
        while True:
            with contextlib.suppress(Stopped):
                self._stop_request.check()
                if not self._halt_reason:
                    self._ask_source()
                    for planned, waiting in self.remote_trials.pop_released():
                        self._queue.push_front(*waiting)
                        if not self._has_ended_remotely(planned):
                            self._queue.push_front(planned)
                    self._start_ready_trials()
            if self._running:
                for ended, seconds in self._wait_for_trials():
                    self._handle_end(ended, seconds)
            elif self.is_stopping or self._halt_reason or not self._sleep_while_waiting():
                return

    # Before the first trial

    def _queue_missing_trials(self) -> None:
        missing = []
        for planned in self.plan.trials:
            status = self._read_status(planned)
            if status == "failed" and self.retry_failed:
                status = forget_failure(self.store, planned.trial.id)
            if status is None:
                missing.append(planned)
            else:
                self._states[planned.trial.id] = status
        if missing and self.prepare is not None:
            missing = self.prepare(missing, self._stop_request.check)
        for planned in queues.order_trials(missing):
            self._trials[planned.trial.id] = planned  # as it was prepared
            status = ended_status(self.store, planned.trial.id)
            if status is None:
                self._queue.push(planned)
            else:
                self._record_end(planned, status, 0.0)

    def _read_status(self, planned: PlannedTrial) -> str | None:
        """Return how a trial of this sweep has ended, by pruning too; None if it has not."""
        pruning = planner.uses_pruning(self.plan.sweep)
        return ended_status(self.store, planned.trial.id, pruned=pruning)

    # Where trials come from

    def _ask_source(self) -> None:
        """Queue what the source supplies; tell it at once of a trial that has ended before."""
        while self.source is not None and (asked := self.source.ask()) is not None:
            trial_id = asked.trial.id
            planned: PlannedTrial | None = asked
            is_known = trial_id in self._trials
            self._trials.setdefault(trial_id, asked)
            status = self._read_status(asked)
            rungs = {} if status is None else self.store.rungs(asked.trial.training_id)
            while planned is not None and planned.trial.until in rungs:
                planned = self.source.resume_or_prune(planned)  # of a history that is made again
            if planned is None:
                self._states[trial_id] = "pruned"
            elif status == "pruned":  # it was asked for again, to go on
                self._requeue(planned)
            elif status is not None:
                self._states[trial_id] = status
                self.source.tell(planned, status)
            elif not is_known:
                self.executor.check_requests([planned.trial.resources])
                self._queue.push(planned)

    def _requeue(self, planned: PlannedTrial) -> None:
        """Queue a trial that has paused, to go on."""
        self._trials[planned.trial.id] = planned
        self._states.pop(planned.trial.id, None)
        self._queue.push(planned)

    def _has_ended_remotely(self, planned: PlannedTrial) -> bool:
        """Return whether another process has ended a trial; then count it."""
        if (status := ended_status(self.store, planned.trial.id)) is None:
            return False
        self._finish(planned, status, None)
        return True

    # Start

    def _start_ready_trials(self) -> None:
        self._queue.push_front(*self._trunks.pop_ready())
        self._queue.push_front(*self._trainings.pop_trained(self.store))
        for planned in self._queue.pop_ready(self.executor):
            trial = planned.trial
            if self._has_ended_remotely(planned):
                continue
            if queues.next_task(planned, self.store) != planned:  # trained while it waited
                self._queue.push(planned)
                continue
            self._trials[trial.id] = planned
            source = initial_weights.find_missing_source(trial, self.store)
            if source is not None and self._must_wait_for_source(planned, source):
                continue
            if self._trainings.is_running(trial.training_id):
                self._trainings.wait_for(trial.training_id, planned)
            elif self.remote_trials.holds(trial):
                self._wait_for_remote(planned)
            elif self._trunks.is_worthwhile(trial):
                self._trunks.add(planned)
            else:
                if not self.store.is_trained(trial.training_id):
                    self._trainings.begin(trial.training_id, trial)
                if source is not None:
                    self._trainings.begin(source.training_id, trial)
                self._running[trial.id] = time.monotonic()
                self.on_event(Event("started", planned))
                self.executor.start(trial)

    def _wait_for_remote(self, planned: PlannedTrial) -> None:
        """Let a trial wait for the process that runs it; say so once for each process."""
        self.remote_trials.add(planned)
        self._say_once("waiting", planned, self.remote_trials.describe_wait(planned.trial))

    def _say_once(
        self, kind: Literal["waiting", "healed"], planned: PlannedTrial, message: str
    ) -> None:
        if message not in self._said:
            self._said.add(message)
            self.on_event(Event(kind, planned, message=message))

    def _must_wait_for_source(self, planned: PlannedTrial, source: TrainedWeights) -> bool:
        """Let a trial wait for the training that it starts from; fail it if none is to come.

        Returns:
            False if it may train its source again: one that was done, and is lost.
        """
        training_id = source.training_id
        sharing = [p.trial.id for p in self.plan.trials if p.trial.training_id == training_id]
        states = {self._states.get(trial_id) for trial_id in sharing}
        if None in states or self._trainings.is_running(training_id):
            self._trainings.wait_for(training_id, planned)
        elif "done" in states:
            return False
        else:
            error = SourceMissing(initial_weights.explain_missing_source(source, self.store))
            self._handle_end(EndedTask(planned.trial.id, error=error), 0.0)
        return True

    # Wait

    def _wait_for_trials(self) -> list[tuple[EndedTask, float]]:
        """Return what has ended, and the seconds for which it ran."""
        return [
            (ended, time.monotonic() - self._running.pop(ended.task_id))
            for ended in self.executor.wait(WAIT_SECONDS)
        ]

    def _sleep_while_waiting(self) -> bool:
        """Sleep while nothing runs here; return False at once if no trial waits for anything."""
        seconds = WAIT_SECONDS
        blocked, delay = self._queue.blocked, self._queue.delay
        if blocked is not None:  # a machine has left the cluster, or others use it
            text = "its resources are in use by others; it starts when there is room"
            try:
                self.executor.check_requests([blocked.trial.resources])
            except ResourceError as error:
                text = f"{error}; it starts if such a machine joins"
            self._say_once("waiting", blocked, text)
        elif self.remote_trials:
            self.remote_trials.check_progress()
        elif delay is not None:
            seconds = min(WAIT_SECONDS, delay)
        else:
            return False
        time.sleep(seconds)
        return True

    # End

    def _handle_end(self, ended: EndedTask, seconds: float) -> None:
        """Classify how a trial has ended, and record, retry or requeue it."""
        planned = self._trials[ended.task_id]
        self._queue.push_front(*self._trainings.end(planned))
        if ended.outcome != "elsewhere":
            for line in self.store.repairs(ended.task_id):
                self._say_once("healed", planned, line)
        if isinstance(ended.error, StoreError):
            raise ended.error
        status: str | None = ended_status(self.store, planned.trial.id)
        if isinstance(ended.error, CodeChanged):
            text = f"no more trials are started: {ended.error}; those that run go on to their end"
            self._halt(planned, f"{text}. Submit again; `kvlab plan` shows trials of other code")
        elif status is None and ended.error is not None:
            status = self._retry_or_record(planned, ended.error)
        elif status is None and ended.outcome == "paused":
            status = self._resume_or_prune(planned)
        elif status is None and ended.outcome not in NOT_OVER:
            text = f"trial {ended.task_id} ended as {ended.outcome}, but {self.store.path} has no"
            raise StoreError(f"{text} result of it; workers and driver must share the store")
        if status is not None:
            self._finish(planned, status, seconds)
        elif ended.outcome is not None:  # without a result
            self.on_event(Event("ended", planned, ended.outcome, seconds))
            if ended.outcome == "elsewhere":
                self._wait_for_remote(planned)
            elif ended.outcome == "trained":
                self._queue.push(planned)
            elif ended.outcome == "stopped" and not (
                self.is_stopping or self._stop_request.is_pending()
            ):
                self._queue.push_front(planned)  # the request to stop has been withdrawn

    def _retry_or_record(self, planned: PlannedTrial, error: BaseException) -> str | None:
        """Queue a killed trial again, or record its failure; return the status of its result."""
        retry = self._retry_policy.after_kill(planned, error)
        if retry is not None:
            self._queue_retry(retry)
            return None
        failure = self._retry_policy.lasting_failure(planned, error)
        if finalize.record_failure(planned.trial, self.store, self.origin, failure):
            return "failed"
        status = ended_status(self.store, planned.trial.id)
        if status is None:  # another process runs it after all: wait for that one
            self._queue.push_front(planned)
        return status

    def _resume_or_prune(self, planned: PlannedTrial) -> str | None:
        """Let the source decide about a paused trial; return ``pruned`` if it does not go on."""
        assert self.source is not None, "only trials of a source pause"
        resumed = self.source.resume_or_prune(planned)
        if resumed is None and finalize.record_pruned(planned.trial, self.store, self.origin):
            return "pruned"
        status = ended_status(self.store, planned.trial.id)
        if status is None:
            self._requeue(resumed or planned)
        return status

    def _finish(self, planned: PlannedTrial, status: str, seconds: float | None) -> None:
        """Count a trial that has ended, or retry it; ``seconds`` is None if it ran elsewhere."""
        if status == "failed" and seconds is not None:
            retry = self._retry_policy.after_failure(planned)
            if retry is not None and forget_failure(self.store, planned.trial.id) is None:
                self._queue_retry(retry)
                return
        halt_reason = self._retry_policy.reason_to_halt(planned) if status == "failed" else None
        self._record_end(planned, status, seconds)
        self._queue.push_front(*self._trainings.pop_waiting(planned.trial.training_id))
        if halt_reason:
            self._halt(planned, halt_reason)

    def _halt(self, planned: PlannedTrial, reason: str) -> None:
        """Start no more trials. The first reason is kept."""
        if not self._halt_reason:
            self._halt_reason = reason
            self.on_event(Event("halted", planned, message=reason))

    def _queue_retry(self, retry: Retry) -> None:
        self._trials[retry.planned.trial.id] = retry.planned
        self._queue.push_delayed(retry.planned, retry.delay_seconds)
        self.on_event(Event("retried", retry.planned, message=retry.reason))

    def _record_end(self, planned: PlannedTrial, status: str, seconds: float | None) -> None:
        self._states[planned.trial.id] = status
        self.on_event(Event("ended", planned, status, seconds))
        if self.source is not None and status != "pruned":
            self.source.tell(planned, status)
        if seconds is not None:
            self._trials_run += 1
            self.on_result(planned.trial.id)  # a server may take seconds

    def _summarize(self) -> Summary:
        for trial_id in [one for one, status in self._states.items() if status == "failed"]:
            del self._states[trial_id]  # another driver may have retried it since
            if (status := ended_status(self.store, trial_id)) is not None:
                self._states[trial_id] = status
        has_more = self.source is not None and not self.source.stop_reason
        states, halt_reason = self.count_states(), self._halt_reason
        return Summary(states, self._trials_run, self.is_stopping, halt_reason, has_more)


def run_stages(
    stage: Stage, run_stage: Callable[[Stage], Summary], plan_next: Callable[[], Stage]
) -> Summary:
    """Run a stage and all that follow it.

    A failed or diverged trial does not keep the next stage from being planned. It ends early if
    trials are missing after a stage: the driver was asked to stop, or gave up.

    Args:
        stage: The first one to run.
        run_stage: Runs one stage with a `Driver`, which records its description even if
            no trial is missing.
        plan_next: Plans the next stage from the record; see
            `kvlab.sweep.planning.stages.plan_stage`.

    Returns:
        The states after the last stage; the trials that ran in all stages together.
    """
    total = run_stage(stage)
    while not (stage.is_last or total.stopped or total.states["missing"] or total.halt_reason):
        stage = plan_next()
        summary = run_stage(stage)
        total = replace(summary, trials_run=total.trials_run + summary.trials_run)
    return replace(total, has_more=total.has_more or not stage.is_last)
