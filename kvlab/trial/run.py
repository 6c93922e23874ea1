"""The contract of a trial's two stages. The real ones are in `kvlab.trial.stages`."""

import errno
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Protocol

from kvlab.errors import Diverged, LeaseLost, Paused, SourceMissing, Stopped, StoreError, WorkerLost
from kvlab.fs.atomic_files import write_json
from kvlab.fs.lease import Fence
from kvlab.store import Store
from kvlab.store.attempt import Attempt, log_warnings, redirect_output
from kvlab.store.failure import Failure
from kvlab.store.progress import OnProgress, ProgressReporter, ProgressUpdate
from kvlab.store.provenance import Origin, build_provenance
from kvlab.store.result import TrialMeasurements, build_result, describe_trial
from kvlab.trial.fingerprint import training_identity
from kvlab.trial.initial_weights import explain_missing_source
from kvlab.trial.trial import Trial

ReportProgress = Callable[[ProgressUpdate], None]


class Stages(Protocol):
    """The work of one trial, after its directories are locked."""

    def train(self, directory: Path, should_stop: Callable[[], bool], fence: Fence) -> None:
        """Trains into ``directory``, from its last checkpoint on; writes training.json last.

        Raises:
            Stopped: ``should_stop()`` became true; a checkpoint is written.
            Paused: the trial's ``until`` is reached; a checkpoint and rungs.json are written.
            Diverged: the loss is no number any more.
        """
        ...

    def measure(self, directory: Path) -> TrialMeasurements:
        """Loads the weights of ``directory`` and measures them as the experiment says."""
        ...


MakeStages = Callable[[Trial, ReportProgress], Stages]


# Whether a running trial should go on: asked often, looked up now and then.


STOP_CHECK_SECONDS = 0.2


def make_stop_check(flags: Sequence[str | None], fences: Sequence[Fence]) -> Callable[[], bool]:
    """Whether one of the flag files is there, looked up a few times a second at most.

    Then it also asks the fences, which raise LeaseLost. It may travel to other processes.
    """
    checked = float("-inf")
    found = False

    def check() -> bool:
        nonlocal checked, found
        if not found and time.monotonic() - checked > STOP_CHECK_SECONDS:
            checked = time.monotonic()
            for fence in fences:
                fence.check()
            found = any(flag is not None and os.path.exists(flag) for flag in flags)
        return found

    return check


# `run_trial`: the one street from a trial to its result, on a worker or in this process.


Outcome = Literal["done", "failed", "diverged", "stopped", "paused", "elsewhere"]

_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def run_trial(
    trial: Trial,
    store: str | Path,
    on_progress: OnProgress | None = None,
    *,
    origin: Origin | None = None,
    make_stages: MakeStages | None = None,
    capture_output: bool = False,
    wait: bool = True,
) -> Outcome:
    """Runs one trial to its end, or does nothing if it has ended before.

    Training is skipped where its weights exist and goes on from the last checkpoint where it
    was interrupted. A failure of the trial itself is recorded, never raised. If another process
    runs this trial's training now, this one waits for it.

    Args:
        trial: what to run.
        store: path of the store.
        on_progress: gets the stages' updates, at most about twice a second.
        origin: who asked; its stop flag is obeyed at the next step.
        make_stages: the work; default training and measurement with torch.
        capture_output: send what this process prints to the attempt's log.
        wait: for another process that runs this trial now.

    Returns:
        How it ended. ``stopped`` and ``paused`` (at ``trial.until``) leave no result: run again,
        the trial goes on. ``elsewhere`` leaves it to another process, which has it now, or took
        it over from this one.

    Raises:
        StoreError: nothing can be recorded, as when the disk is full.
    """
    origin = origin or Origin()
    run = _TrialRun(trial, Store(store), origin, make_stages or _make_torch_stages, on_progress)
    try:
        return run.locked(capture_output, wait)
    except Stopped:
        return "stopped"
    except LeaseLost:
        return "elsewhere"


class _TrialRun:
    """One call of `run_trial`."""

    def __init__(
        self,
        trial: Trial,
        store: Store,
        origin: Origin,
        make_stages: MakeStages,
        on_progress: OnProgress | None,
    ):
        self.trial, self.store, self.origin = trial, store, origin
        self.make_stages, self.on_progress = make_stages, on_progress
        self.fences: list[Fence] = []
        self.fence: Fence | None = None
        self.should_stop = make_stop_check((origin.stop_flag, origin.own_stop_flag), self.fences)

    def locked(self, capture_output: bool, wait: bool) -> Outcome:
        """Everything, under the trial's lock."""
        lock = self.store.trial_lock(self.trial.id)
        with lock.hold(None if wait else 0.0, on_wait=self.check_stop) as fence:
            if fence is None:
                return "elsewhere"
            self.fences.append(fence)
            self.fence = fence
            ended = self.store.status(self.trial.id)
            if ended == "damaged" or ended == "pruned":
                self.store.archive_result(self.trial.id)
            elif ended is not None:
                return ended
            self.check_stop()
            progress = self.store.trial_directory(self.trial.id) / "progress.json"
            attempt = self.begin()
            try:
                with ExitStack() as stack:
                    stack.enter_context(log_warnings(attempt))
                    if capture_output:
                        stack.enter_context(redirect_output(attempt.log_path))
                    return self.attempt(
                        attempt, ProgressReporter(progress, attempt.log, self.on_progress, fence)
                    )
            finally:
                if fence.holds():
                    progress.unlink(missing_ok=True)

    def begin(self) -> Attempt:
        trial = self.trial
        self.store.write_trial(trial.id, describe_trial(trial), self.fence)
        attempt = Attempt(self.store, trial.id, self.fence)
        attempt.log(f"attempt {attempt.number} at trial {trial.id}, training {trial.training_id}")
        return attempt

    def attempt(self, attempt: Attempt, report: ProgressReporter) -> Outcome:
        """Both stages; whatever ends them is recorded, except a stop and a broken store."""
        try:
            self.record(attempt, self.stages(report))
        except Stopped:
            attempt.log("stopped; it goes on from its last checkpoint when submitted again")
            raise
        except Paused as pause:
            attempt.log(str(pause))
            attempt.mark_paused()
            return "paused"
        except LeaseLost as error:
            attempt.log(f"given up: {error}")
            raise
        except StoreError:
            self.check_fences()
            raise
        except WorkerLost as error:
            self.check_fences()
            attempt.log(f"{error}; whoever started the trial decides on another attempt")
            raise
        except Exception as error:
            self.check_fences()
            if isinstance(error, OSError) and error.errno in _DISK_FULL_CODES:
                text = f"{self.store.path} cannot be written: {error.strerror}"
                raise StoreError(f"{text}; free or repair the disk, submit again") from None
            return self.fail(attempt, error)
        attempt.log("done")
        return "done"

    def record(self, attempt: Attempt, measured: TrialMeasurements) -> None:
        self.store.write_items(self.trial.id, measured.items, self.fence)
        facts = build_provenance(
            self.origin,
            started=attempt.started,
            attempts=attempt.number,
            pauses=self.store.count_pauses(self.trial.id),
            machine=measured.machine,
            data=measured.data,
        )
        self.store.write_result(
            build_result(self.trial, "done", facts, measured=measured), self.fence
        )

    def fail(self, attempt: Attempt, error: Exception) -> Outcome:
        trace = attempt.write_traceback(traceback.format_exc())
        failure = Failure.from_error(error, trace)
        status: Literal["failed", "diverged"] = (
            "diverged" if failure.kind == "diverged" else "failed"
        )
        facts = build_provenance(self.origin, started=attempt.started, attempts=attempt.number)
        self.store.write_result(
            build_result(self.trial, status, facts, failure=failure), self.fence
        )
        attempt.log(f"{status} ({failure.kind}): {failure.type}: {failure.message}")
        return status

    def stages(self, report: ProgressReporter) -> TrialMeasurements:
        stages = self.make_stages(self.trial, self.stoppable(report))
        directory = self.store.training_directory(self.trial.training_id)
        self.train(stages, directory, report)
        self.check_stop()
        return stages.measure(directory)

    def train(self, stages: Stages, directory: Path, report: ProgressReporter) -> None:
        """The training stage, by one process at a time; the others wait and find it done."""
        training = self.trial.training_id

        def waiting() -> None:
            self.check_stop()
            report({"stage": "waiting", "note": "its training runs in another trial"})

        lock = self.store.training_lock(training)
        with lock.hold(on_wait=waiting) as fence:
            assert fence is not None, "acquired without a time limit"
            with self.fenced(fence):
                self.train_locked(stages, directory, fence)

    def train_locked(self, stages: Stages, directory: Path, fence: Fence) -> None:
        training = self.trial.training_id
        if self.store.is_trained(training):
            return
        if self.trial.until is not None and self.trial.until in self.store.rungs(training):
            raise Paused(f"its training has paused after step {self.trial.until} before")
        message = self.store.divergence(training)
        if message is not None:
            raise Diverged(message)
        source = self.trial.source_training
        if source is not None and not self.store.is_trained(source.training_id):
            raise SourceMissing(explain_missing_source(self.trial, self.store))
        if not (directory / "config.json").exists():
            trial = self.trial
            identity = training_identity(
                trial.experiment, trial.data_identity, trial.seed, trial.initial_weights
            )
            write_json(directory / "config.json", identity, fence=fence)
        try:
            stages.train(directory, self.should_stop, fence)
        except Diverged as error:
            self.store.write_divergence(training, str(error), fence)
            raise

    def stoppable(self, report: ProgressReporter) -> ReportProgress:
        """Training checks for a stop itself, to write a checkpoint; other stages stop here."""

        def update(state: ProgressUpdate) -> None:
            report(state)
            if state.get("stage") != "training":
                self.check_stop()

        return update

    def check_stop(self) -> None:
        if self.should_stop():
            raise Stopped("asked to stop")

    def check_fences(self) -> None:
        """Raises LeaseLost if an error may be another process's doing, which took this over."""
        for fence in self.fences:
            fence.check()

    @contextmanager
    def fenced(self, fence: Fence) -> Iterator[None]:
        """For the length of a block, `fence` must hold too."""
        self.fences.append(fence)
        try:
            yield
        except Exception:
            self.check_fences()
            raise
        finally:
            self.fences.remove(fence)


def _make_torch_stages(trial: Trial, report: ReportProgress) -> Stages:
    from kvlab.trial.stages import TorchStages

    return TorchStages(trial, report)
