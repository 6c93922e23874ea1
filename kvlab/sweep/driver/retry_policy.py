"""Failure policies: whether a trial is started again, how, and when a sweep makes no sense.

Each decides from the record alone, and decides nothing about what a trial computes: a smaller
microbatch changes where a step's memory goes, not its mathematics.
"""

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any

from kvlab.errors import ResourceError, StoreError
from kvlab.layout.training_memory import microbatch_rows
from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.spec.sweep import FailuresConfig
from kvlab.store import Store
from kvlab.store.failure import OUT_OF_MEMORY, Failure
from kvlab.sweep.executors.executor import Executor, WorkerKilled
from kvlab.sweep.planning.planner import PlannedTrial

MAX_BACKOFF_SECONDS = 300.0

_FRAME = re.compile(r'^ *File ".*", line \d+, in .*$', re.MULTILINE)
_STAGES = ("waiting", "data", "training", "evaluation", "benchmark")


@dataclass(frozen=True)
class Retry:
    """Start ``planned`` once more, ``seconds`` from now; ``why`` is for those who watch."""

    planned: PlannedTrial
    seconds: float
    why: str


class RetryPolicy:
    """The policies of one driver's run.

    Args:
        config: what the sweep says.
        store: where failures and progress are recorded.
        executor: says what could be met.
    """

    def __init__(self, config: FailuresConfig, store: Store, executor: Executor):
        self._config, self._store, self._executor = config, store, executor
        self._kills: dict[str, int] = {}
        self._furthest: dict[str, tuple[int, int]] = {}
        self._places: dict[tuple[str, ...], set[str]] = {}

    def killed(self, planned: PlannedTrial, error: WorkerKilled) -> Retry | None:
        """After its process died: again, later each time, unless it died too often in a row
        without getting any further."""
        trial = planned.trial.id
        reached = self._reached(trial)
        if reached > self._furthest.get(trial, (-1, -1)):
            self._furthest[trial], self._kills[trial] = reached, 0
        self._kills[trial] += 1
        count, most = self._kills[trial], self._config.killed_retries
        if count > most:
            return None
        seconds = min(self._config.backoff_seconds * 2 ** min(count - 1, 30), MAX_BACKOFF_SECONDS)
        return Retry(planned, seconds, f"{error}; retry {count} of {most} in {seconds:g}s")

    def lasting(self, planned: PlannedTrial, error: BaseException) -> Failure:
        """What is recorded of an error after which it is not started again."""
        if not isinstance(error, WorkerKilled):
            return Failure.from_error(error)
        kills = self._kills.get(planned.trial.id, 0)
        text = f"{error}, {kills} times; its log is in the last attempt"
        return Failure("killed", type(error).__name__, text)

    def failed(self, planned: PlannedTrial) -> Retry | None:
        """After a recorded failure: again with less memory, if memory was the matter.

        A microbatch lies in the device's memory. Of a trial on a GPU it saves the host nothing:
        there only fewer trials at once do.
        """
        error = self._error(planned)
        if (
            error is None
            or error["class"] not in OUT_OF_MEMORY
            or self._config.out_of_memory == "fail"
        ):
            return None
        experiment = planned.trial.experiment
        trained = self._store.is_trained(planned.trial.training_id)
        resources = experiment.resources
        beside = resources.devices > 0 and error["class"] == "host_memory"
        tokens = None if trained or beside else smaller_microbatch(experiment)
        if tokens is not None:
            changed = resources.model_copy(update={"microbatch_tokens": tokens})
            how = f"microbatch_tokens = {tokens:,}"
        elif resources.shares:
            changed = resources.model_copy(update={"gpus": 1.0})
            how = "a GPU of its own"
        else:
            return None
        if not self._fits(changed):
            return None
        trial = replace(
            planned.trial, experiment=experiment.model_copy(update={"resources": changed})
        )
        whose = str(error["class"]).removesuffix("_memory")
        why = f"{whose} memory ran out ({error['type']}); again with {how}"
        return Retry(replace(planned, trial=trial), 0.0, why)

    def hopeless(self, planned: PlannedTrial) -> str | None:
        """Why the sweep should stop: the same error at the same place, trial after trial."""
        error = self._error(planned)
        if error is None or not self._config.same_error or error["class"] == "killed":
            return None
        trials = self._places.setdefault(self._place(planned, error), set())
        trials.add(planned.trial.id)
        if len(trials) < self._config.same_error:
            return None
        first = (str(error["message"]).splitlines() or [""])[0]
        text = f"{len(trials)} trials failed at the same place ({error['type']}: {first})"
        return f"{text}; mend it, then submit again with --retry-failed"

    def _error(self, planned: PlannedTrial) -> dict[str, Any] | None:
        """What the record says about a failure; None where it is damaged."""
        try:
            return (self._store.result(planned.trial.id) or {}).get("error")
        except StoreError:
            return None

    def _fits(self, resources: ResourcesConfig) -> bool:
        try:
            self._executor.check([resources])
        except ResourceError:
            return False
        return True

    def _place(self, planned: PlannedTrial, error: dict[str, Any]) -> tuple[str, ...]:
        """Where an error comes from: its frames, else what it says."""
        kind = (str(error["class"]), str(error["type"]))
        if error.get("traceback"):
            path = self._store.trial_directory(planned.trial.id) / error["traceback"]
            with contextlib.suppress(OSError):
                frames = _FRAME.findall(path.read_text(encoding="utf-8"))
                if frames:
                    return (*kind, *frames)
        return (*kind, str(error["message"]))

    def _reached(self, trial: str) -> tuple[int, int]:
        """How far the trial was when it was last heard of: the stage and the step in it."""
        state = self._store.progress(trial) or {}
        stage = state.get("stage")
        return _STAGES.index(stage) if stage in _STAGES else -1, int(state.get("step") or 0)


def smaller_microbatch(experiment: Experiment) -> int | None:
    """Tokens of the next smaller microbatch, None if it is one row already.

    Half of what it was. On a GPU an unset microbatch was made for a memory that is not known
    here: then it goes on from a quarter of the step, and from there down.
    """
    block = experiment.model.block_size
    rows = experiment.training.batch_tokens // block
    resources = experiment.resources
    if resources.devices and resources.microbatch_tokens is None:
        most = max(1, rows // 4)
    else:
        most = microbatch_rows(experiment, None) // 2
    if most < 1 or rows == 1:
        return None
    return block * max(n for n in range(1, most + 1) if rows % n == 0)
