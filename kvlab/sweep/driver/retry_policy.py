"""Decide after a failure: start the trial again, record the failure, or halt the sweep.

Every decision follows from the record. None changes what a trial computes: a smaller microbatch
changes where a step's memory goes, not its mathematics.
"""

import contextlib
import re
from dataclasses import dataclass
from typing import Any

from kvlab.errors import ResourceError, StoreError, WorkerKilled
from kvlab.fs.atomic_files import read_regular
from kvlab.layout.training_memory import microbatch_rows
from kvlab.spec import Experiment
from kvlab.spec.sweep import FailuresConfig
from kvlab.store import Store
from kvlab.store.record_forms import EndStatus
from kvlab.store.result import OUT_OF_MEMORY, Failure
from kvlab.sweep.executors.executor import Executor
from kvlab.sweep.planning.planner import PlannedTrial, ended_status

MAX_BACKOFF_SECONDS = 300.0
FORGET_TIMEOUT_SECONDS = 1.0

MEMORY_WAIT_SECONDS = 30.0
"""Wait for other processes to return the machine's memory."""

_FRAME = re.compile(r'^ *File ".*", line \d+, in .*$', re.MULTILINE)
_MAX_TRACEBACK = 1_000_000
"""Bytes of a traceback that are read."""

_PARTS = ("waiting", "data", "training", "evaluation", "benchmark")
"""What a trial does, one after the other: ``stage`` of its progress."""


@dataclass(frozen=True)
class Retry:
    """Start a trial again.

    Attributes:
        planned: The trial, with the resources that it gets now.
        delay_seconds: Wait before the start.
        reason: For people.
    """

    planned: PlannedTrial
    delay_seconds: float
    reason: str


class RetryPolicy:
    """The failure policies of one driver's run.

    Args:
        config: ``failures`` of the sweep.
        store: Holds the failures and the progress of trials.
        executor: Says which requests can be met.
    """

    def __init__(self, config: FailuresConfig, store: Store, executor: Executor):
        self._config, self._store, self._executor = config, store, executor
        self._kills: dict[str, int] = {}  # trial id -> kills in a row without progress
        self._has_waited: set[str] = set()  # trials that have waited for memory
        self._furthest: dict[str, tuple[int, int]] = {}  # trial id -> furthest part and step
        self._failed_at: dict[tuple[str, ...], set[str]] = {}  # error location -> trial ids

    def after_kill(self, planned: PlannedTrial, error: BaseException) -> Retry | None:
        """Retry a trial whose process was killed, with exponential backoff.

        Returns:
            None after ``killed_retries`` kills in a row between which the trial got no further;
            after the second kill for the machine's memory; and after any other error.
        """
        trial_id = planned.trial.id
        if isinstance(error, MemoryError):
            return self._wait_for_memory(planned, str(error))
        if not isinstance(error, WorkerKilled):
            return None
        state = self._store.progress(trial_id) or {}
        part = _PARTS.index(state["stage"]) if state.get("stage") in _PARTS else -1
        progress = part, int(state.get("step") or 0)
        if progress > self._furthest.get(trial_id, (-1, -1)):
            self._furthest[trial_id], self._kills[trial_id] = progress, 0
        self._kills[trial_id] += 1
        kills, limit = self._kills[trial_id], self._config.killed_retries
        if kills > limit:
            return None
        delay = min(self._config.backoff_seconds * 2 ** min(kills - 1, 30), MAX_BACKOFF_SECONDS)
        return Retry(planned, delay, f"{error}; retry {kills} of {limit} in {delay:g}s")

    def _wait_for_memory(self, planned: PlannedTrial, reason: str) -> Retry | None:
        """Retry a trial once as it is: other processes may have taken the machine's memory."""
        if planned.trial.id in self._has_waited:
            return None
        self._has_waited.add(planned.trial.id)
        reason = f"{reason}; again in {MEMORY_WAIT_SECONDS:g}s, as others may have taken it"
        return Retry(planned, MEMORY_WAIT_SECONDS, reason)

    def after_failure(self, planned: PlannedTrial) -> Retry | None:
        """Retry a trial whose recorded failure is a lack of memory, with less memory.

        Returns:
            None if the failure is of another kind, or nothing can be reduced any more, and the
            trial has waited for the machine's memory.
        """
        error = self._read_error(planned)
        is_kept = self._config.out_of_memory == "fail"
        if error is None or error["class"] not in OUT_OF_MEMORY or is_kept:
            return None
        resources, memory = planned.trial.resources, str(error["class"]).removesuffix("_memory")
        cause = f"{memory} memory ran out ({error['type']})"
        # A microbatch takes the device's memory. A smaller one saves the host nothing if the trial
        # trains on a GPU: there, only fewer trials at once do.
        tokens = None
        is_trained = self._store.is_trained(planned.trial.training_id)
        if not is_trained and not (resources.devices > 0 and memory == "host"):
            tokens = smaller_microbatch(planned.trial.experiment)
        if tokens is not None:
            reduced = planned.with_resources(microbatch_tokens=tokens)
            change = f"microbatch_tokens = {tokens:,}"
        elif resources.shares_gpu:
            reduced, change = planned.with_resources(gpus=1.0), "a GPU of its own"
        else:
            return self._wait_for_memory(planned, cause) if memory == "host" else None
        try:
            self._executor.check_requests([reduced.trial.resources])
        except ResourceError:
            return None
        return Retry(reduced, 0.0, f"{cause}; again with {change}")

    def lasting_failure(self, planned: PlannedTrial, error: BaseException) -> Failure:
        """Return what is recorded of an error after which the trial is not started again."""
        if not isinstance(error, WorkerKilled):
            return Failure.from_error(error)
        message = f"{error}, {self._kills[planned.trial.id]} times; the last attempt has its log"
        return Failure("killed", type(error).__name__, message)

    def reason_to_halt(self, planned: PlannedTrial) -> str | None:
        """Return why the sweep should halt after a failed trial.

        The reason is the same error at the same place in ``same_error`` trials.
        """
        error = self._read_error(planned)
        if error is None or not self._config.same_error or error["class"] == "killed":
            return None
        frames = list[str]()
        if error.get("traceback"):
            path = self._store.trial_directory(planned.trial.id) / error["traceback"]
            with contextlib.suppress(OSError):
                frames = _FRAME.findall(read_regular(path, _MAX_TRACEBACK).decode(errors="replace"))
        location = (error["class"], error["type"], *(frames or [error["message"]]))
        trials = self._failed_at.setdefault(location, set())
        trials.add(planned.trial.id)
        if len(trials) < self._config.same_error:
            return None
        first_line = (str(error["message"]).splitlines() or [""])[0]
        text = f"no more trials are started, as {len(trials)} failed at the same place"
        text = f"{text} ({error['type']}: {first_line}); those that run go on to their end"
        return f"{text}. Fix it, then submit again with --retry-failed"

    def _read_error(self, planned: PlannedTrial) -> dict[str, Any] | None:
        """Return the recorded error of a trial; None if its result is damaged."""
        try:
            return (self._store.result(planned.trial.id) or {}).get("error")
        except StoreError:
            return None


def forget_failure(store: Store, trial_id: str) -> EndStatus | None:
    """Set a failed trial's result aside, so that it can run again, and return its status.

    Another process may have taken the trial meanwhile; then its result stays.
    """
    with store.trial_lock(trial_id).hold(timeout=FORGET_TIMEOUT_SECONDS) as fence:
        if fence is not None and store.status(trial_id) == "failed":
            store.archive_result(trial_id)
    return ended_status(store, trial_id)


def smaller_microbatch(experiment: Experiment) -> int | None:
    """Return the tokens of the next smaller microbatch; None if it is one row already.

    It has at most half of the rows. On a GPU, the size of a microbatch that is not set depends on
    the GPU's memory, which is not known here: then the next one has a quarter of a worker's rows.
    """
    block_size, resources = experiment.model.block_size, experiment.resources
    rows = experiment.training.batch_tokens // block_size // resources.training_workers
    if resources.devices and resources.microbatch_tokens is None:
        max_rows = max(1, rows // 4)
    else:
        max_rows = microbatch_rows(experiment, None) // 2
    if max_rows < 1 or rows == 1:
        return None
    return block_size * max(n for n in range(1, max_rows + 1) if rows % n == 0)
