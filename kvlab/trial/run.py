"""`run_trial`: run one trial from its configuration to its result, in this process.

Training and measurement are behind the `Stages` protocol; `kvlab.trial.stages` has the ones with
torch. Everything here is locking, resuming and recording.
"""

import copy
import errno
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, Protocol

from kvlab.data import dataset_folder, set_aside_dataset
from kvlab.errors import (
    DatasetDamaged,
    Diverged,
    LeaseLost,
    Paused,
    RecordDamaged,
    SourceDamaged,
    SourceMissing,
    Stopped,
    StoreError,
    WorkerLost,
)
from kvlab.fs.atomic_files import write_atomic
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.humanize import format_duration
from kvlab.store import Store
from kvlab.store.attempt import (
    Attempt,
    OnProgress,
    ProgressReporter,
    ProgressUpdate,
    StallWatch,
    log_warnings,
    redirect_output,
    stall_seconds,
)
from kvlab.store.provenance import Origin, build_provenance
from kvlab.store.result import Failure, TrialMeasurements, build_result, describe_trial
from kvlab.trial.fingerprint import training_identity
from kvlab.trial.initial_weights import explain_missing_source
from kvlab.trial.trial import Trial

ReportProgress = Callable[[ProgressUpdate], None]

Outcome = Literal["done", "failed", "diverged", "stopped", "paused", "elsewhere"]

STOP_CHECK_SECONDS = 0.2

MAX_REPAIRS = 8
"""How often one attempt makes damaged tokens or weights again, before it fails."""

_WEIGHTS = "final/model.safetensors"

_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Stages(Protocol):
    """The work of one trial, while its directories are locked."""

    def train(self, directory: Path, should_stop: Callable[[], bool], fence: Fence) -> None:
        """Train into ``directory`` from its last checkpoint, and write training.json last.

        Args:
            should_stop: called after every step.
            fence: of the lock on ``directory``.

        Raises:
            Stopped: ``should_stop()`` returned True; a checkpoint is written.
            Paused: the trial's ``until`` is reached; a checkpoint and rungs.json are written.
            Diverged: the loss became NaN or infinite.
        """
        ...

    def measure(self, directory: Path) -> TrialMeasurements:
        """Load the weights from ``directory`` and measure them as the experiment says."""
        ...


MakeStages = Callable[[Trial, ReportProgress], Stages]


class StopCheck:
    """Callable that returns whether a trial should stop. Picklable, for workers of a training.

    Args:
        flags: paths of files whose presence asks for a stop. Looked up every
            `STOP_CHECK_SECONDS` at most, however often it is called.
        fences: checked at the same time; they raise LeaseLost.
    """

    def __init__(self, flags: Sequence[str | Path], fences: Sequence[Fence]):
        self._flags, self._fences = tuple(flags), fences
        self._checked_at = float("-inf")
        self._is_requested = False

    def __call__(self) -> bool:
        if not self._is_requested and time.monotonic() - self._checked_at > STOP_CHECK_SECONDS:
            self._checked_at = time.monotonic()
            for fence in self._fences:
                fence.check()
            self._is_requested = any(map(os.path.exists, self._flags))
        return self._is_requested


def run_trial(
    trial: Trial,
    store: str | Path,
    on_progress: OnProgress | None = None,
    *,
    origin: Origin | None = None,
    stop_flags: Sequence[str | Path] = (),
    make_stages: MakeStages | None = None,
    capture_output: bool = False,
    wait: bool = True,
) -> Outcome:
    """Run one trial to its end; do nothing if it has ended before.

    The training is skipped if its weights exist, and continued from its last checkpoint if it
    was interrupted. If another process runs this trial's training, this call waits for it. A
    failure of the trial itself is recorded and not raised.

    Args:
        on_progress: receives updates of the stages, about twice a second at most.
        origin: the driver that started the trial.
        stop_flags: files whose presence asks the trial to stop at its next step.
        make_stages: makes the stages; default training and measurement with torch.
        capture_output: append what this process prints to the attempt's log.
        wait: for another process that runs this trial, instead of returning ``elsewhere``.

    Returns:
        How it ended. ``stopped`` and ``paused`` (at ``trial.until``) leave no result, and the
        next run continues the trial. ``elsewhere``: another process has the trial, or has taken
        it over from this one.

    Raises:
        StoreError: nothing can be recorded, as when the disk is full.
    """
    origin = origin or Origin()
    make_stages = make_stages or _make_torch_stages
    run = _TrialRun(trial, Store(store), origin, stop_flags, make_stages, on_progress)
    try:
        return run.run(capture_output, wait)
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
        stop_flags: Sequence[str | Path],
        make_stages: MakeStages,
        on_progress: OnProgress | None,
    ):
        self.trial, self.store, self.origin = trial, store, origin
        self.make_stages, self.on_progress = make_stages, on_progress
        self.fences: list[Fence] = []
        self.fence: Fence | None = None
        self.should_stop = StopCheck(stop_flags, self.fences)

    def run(self, capture_output: bool, wait: bool) -> Outcome:
        """Run the trial under its lock."""
        lock = self.store.trial_lock(self.trial.id)
        with lock.hold(None if wait else 0.0, on_wait=self.check_stop) as fence:
            if fence is None:
                return "elsewhere"
            self.fences.append(fence)
            self.fence = fence
            status = self.store.status(self.trial.id)
            aside = None
            if status == "damaged":
                aside = self.store.set_aside_result(self.trial.id, fence)
            elif status == "pruned":
                self.store.archive_result(self.trial.id)
            elif status is not None:
                return status
            self.check_stop()
            progress_path = self.store.trial_directory(self.trial.id) / "progress.json"
            attempt = self.begin_attempt()
            if aside is not None:
                attempt.log_repair(f"its result is damaged; moved to {aside}, it is measured again")
            report = ProgressReporter(progress_path, attempt.log, self.on_progress, fence)
            try:
                with ExitStack() as stack:
                    stack.enter_context(log_warnings(attempt))
                    if capture_output:
                        stack.enter_context(redirect_output(attempt.log_path))
                    return self.run_attempt(attempt, report)
            finally:
                if fence.holds():
                    progress_path.unlink(missing_ok=True)

    def begin_attempt(self) -> Attempt:
        trial = self.trial
        self.store.write_trial(trial.id, describe_trial(trial), self.fence)
        attempt = Attempt(self.store, trial.id, self.fence)
        attempt.log(f"attempt {attempt.number} at trial {trial.id}, training {trial.training_id}")
        return attempt

    def run_attempt(self, attempt: Attempt, report: ProgressReporter) -> Outcome:
        """Run both stages and record how they end, unless by a stop or a broken store."""
        try:
            self.record_result(attempt, self.run_stages(attempt, report))
        except Stopped:
            attempt.log("stopped; submit again to continue from the last checkpoint")
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
            attempt.log(f"{error}; the driver decides whether it runs again")
            raise
        except Exception as error:
            self.check_fences()
            if isinstance(error, OSError) and error.errno in _DISK_FULL_CODES:
                text = f"{self.store.path} cannot be written: {error.strerror}"
                raise StoreError(f"{text}; free or repair the disk, submit again") from None
            return self.record_failure(attempt, error)
        attempt.log("done")
        return "done"

    def run_stages(self, attempt: Attempt, report: ProgressReporter) -> TrialMeasurements:
        """Run both stages; again when tokens or weights prove damaged, which are made again."""
        damage: Exception | None = None
        for _ in range(MAX_REPAIRS):
            try:
                return self.run_stages_once(attempt, report, damage)
            except (DatasetDamaged, SourceDamaged, RecordDamaged) as error:
                self.check_fences()
                attempt.log(str(error))
                damage = error
        return self.run_stages_once(attempt, report, damage)

    def set_aside_dataset(self, attempt: Attempt) -> None:
        aside = set_aside_dataset(dataset_folder(self.trial.experiment.data))
        if aside is not None:  # else another trial has prepared it again meanwhile
            attempt.log_repair(f"tokens are damaged; moved to {aside}, the text is prepared again")

    def repair_source(self, attempt: Attempt, report: ProgressReporter) -> None:
        """Make the weights again that the training starts from, if they are damaged or gone.

        The trials that were measured on them stay. This trial's resources are used, which the
        process has; they are no part of what is computed.
        """
        source = self.trial.source_training
        assert source is not None, "only such a training can miss it"
        run = copy.copy(self)
        run.trial = source.trial_with(self.trial.resources)
        directory = self.store.training_directory(source.training_id)
        attempt.log(f"makes the weights again that it starts from: {source.name}")
        try:
            stages = self.make_stages(run.trial, self.stop_between_updates(report))
            run.train(stages, directory, attempt, report, check_contents=True)
        except SourceDamaged:  # that one started from another, which is lost, too
            run.repair_source(attempt, report)
            raise
        except Diverged:
            raise SourceMissing(explain_missing_source(self.trial, self.store)) from None

    def run_stages_once(
        self, attempt: Attempt, report: ProgressReporter, damage: Exception | None
    ) -> TrialMeasurements:
        """Run both stages.

        Args:
            damage: what an earlier try found damaged, which is made again first.
        """
        if isinstance(damage, DatasetDamaged):
            self.set_aside_dataset(attempt)
        elif isinstance(damage, SourceDamaged):
            self.repair_source(attempt, report)
        stages = self.make_stages(self.trial, self.stop_between_updates(report))
        directory = self.store.training_directory(self.trial.training_id)
        is_damaged = isinstance(damage, RecordDamaged)
        self.train(stages, directory, attempt, report, check_contents=is_damaged)
        self.check_stop()
        return stages.measure(directory)

    def train(
        self,
        stages: Stages,
        directory: Path,
        attempt: Attempt,
        report: ProgressReporter,
        *,
        check_contents: bool = False,
    ) -> None:
        """Train in one process at a time; the others wait and find the training done.

        Args:
            check_contents: read the weights of a training that is done, and train again if they
                are damaged. Otherwise whoever loads them finds out.
        """

        lock = self.store.training_lock(self.trial.training_id)
        watch = StallWatch((directory, directory / "checkpoints"))

        def report_waiting() -> None:
            self.check_stop()
            idle = watch.idle_seconds()
            if idle >= stall_seconds():
                text = f"{lock.path} is held by {lock.describe_holder()}, without progress for"
                hint = f"end that process, or remove {lock.path}.*, then submit again"
                raise StoreError(f"{text} {format_duration(idle)}; {hint}")
            note = lock.describe_wait(f"runs training {self.trial.training_id}")
            report({"stage": "waiting", "note": note})

        with lock.hold(on_wait=report_waiting) as fence:
            assert fence is not None, "acquired without a time limit"
            with self.checking_fence(fence):
                self.set_aside_damage(attempt, fence, check_contents)
                if not self.store.is_trained(self.trial.training_id):
                    self.train_locked(stages, directory, attempt, fence)

    def set_aside_damage(self, attempt: Attempt, fence: Fence, check_contents: bool) -> None:
        """Move what is damaged in a training that is done, so that it is trained again."""
        training = self.trial.training_id
        damage = self.store.check_training(training, contents=check_contents)
        if damage is not None:
            aside = self.store.set_aside_training(training, fence)
            attempt.log_repair(f"{damage}; moved to {aside}")

    def train_locked(self, stages: Stages, directory: Path, attempt: Attempt, fence: Fence) -> None:
        """Train, and compare with a training that was done before if its weights are gone."""
        trial, training = self.trial, self.trial.training_id
        earlier = self.store.earlier_training_record(training)
        if trial.until is not None and trial.until in self.store.rungs(training):
            raise Paused(f"its training has paused after step {trial.until} before")
        message = self.store.divergence(training)
        if message is not None:
            raise Diverged(message)
        source = trial.source_training
        if source is not None and not self.store.is_trained(source.training_id):
            raise SourceDamaged(explain_missing_source(trial, self.store))
        identity = training_identity(
            trial.experiment, trial.data_identity, trial.seed, trial.initial_weights
        )
        # always anew: a damaged one must not be sealed
        write_sealed_json(directory / "config.json", identity, fence=fence)
        try:
            stages.train(directory, self.should_stop, fence)
        except Diverged as error:
            self.store.write_divergence(training, str(error), fence)
            raise
        if earlier is not None:
            attempt.log_repair(self.compare_training(directory, earlier, fence))

    def compare_training(self, directory: Path, earlier: bytes, fence: Fence) -> str:
        """Return whether a training that was run again has the same weights, as a line.

        If all of its files are the same, its earlier record is put in their place again: the
        trials that were measured on these weights name it.
        """
        before = json.loads(earlier)["files"]
        now = read_sealed_json(directory / "training.json", "files")["files"]
        text = f"training {directory.name} has run again, since its weights were lost"
        if before.get("config.json") != now.get("config.json"):
            return text
        if before == now:
            write_atomic(directory / "training.json", earlier, fence=fence)
        if before.get(_WEIGHTS) == now.get(_WEIGHTS):
            return f"{text}: they are the same, bit for bit"
        return f"{text}: they differ from those before, whose trials keep their numbers"

    def record_result(self, attempt: Attempt, measured: TrialMeasurements) -> None:
        files = self.store.write_details(
            self.trial.id,
            items=measured.items,
            texts=measured.texts,
            tasks=measured.tasks,
            fence=self.fence,
        )
        provenance = build_provenance(
            self.origin,
            started=attempt.started,
            attempts=attempt.number,
            pauses=self.store.count_pauses(self.trial.id),
            machine=measured.machine,
            data=measured.data,
        )
        result = build_result(self.trial, "done", provenance, measured=measured)
        seal = self.store.training_seal(self.trial.training_id)
        self.store.write_result({**result, "training_seal": seal, "files": files}, self.fence)

    def record_failure(self, attempt: Attempt, error: Exception) -> Outcome:
        trace = attempt.write_traceback(traceback.format_exc())
        failure = Failure.from_error(error, trace)
        status: Literal["failed", "diverged"] = (
            "diverged" if failure.kind == "diverged" else "failed"
        )
        provenance = build_provenance(self.origin, started=attempt.started, attempts=attempt.number)
        result = build_result(self.trial, status, provenance, failure=failure)
        self.store.write_result(result, self.fence)
        attempt.log(f"{status} ({failure.kind}): {failure.type}: {failure.message}")
        return status

    def stop_between_updates(self, report: ProgressReporter) -> ReportProgress:
        """Return ``report`` with a stop check, except in training, which writes a checkpoint."""

        def update(state: ProgressUpdate) -> None:
            report(state)
            if state.get("stage") != "training":
                self.check_stop()

        return update

    def check_stop(self) -> None:
        if self.should_stop():
            raise Stopped("asked to stop")

    def check_fences(self) -> None:
        """Raise LeaseLost if another process has taken over, which may have caused an error."""
        for fence in self.fences:
            fence.check()

    @contextmanager
    def checking_fence(self, fence: Fence) -> Iterator[None]:
        """Check ``fence`` too during the block."""
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
