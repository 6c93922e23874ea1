"""`run_task`: what an executor runs, in this process; above all a trial, to its result.

Training and measurement are behind the `Trainable` protocol; `kvlab.trial.torch_trainable` has the
one with torch. Everything here is locking, repairing, resuming and recording.
"""

import errno
import json
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from kvlab import errors
from kvlab.fs.atomic_files import explain_write_errors, write_atomic
from kvlab.fs.lease import Fence
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.humanize import summarize_error
from kvlab.oom import is_device_fault
from kvlab.store import Store, attempt
from kvlab.store.attempt import ProgressUpdate
from kvlab.store.partial_results import PartialResults
from kvlab.store.provenance import Origin, build_provenance
from kvlab.store.record_forms import EndStatus
from kvlab.store.result import Failure, TrialMeasurements
from kvlab.store.verification import Damage, heal_directory
from kvlab.trial.code_identity import this_code
from kvlab.trial.initial_weights import explain_missing_source
from kvlab.trial.joint_timing import JointTiming, run_joint_timing
from kvlab.trial.smoke_test import SmokeResult, SmokeTest, run_smoke_test
from kvlab.trial.trial import Trial, build_result, describe_origin, describe_trial

Task = Trial | SmokeTest | JointTiming
"""Plain data, picklable, with an ``id`` and the ``resources`` that it needs."""

ReportProgress = Callable[[ProgressUpdate], None]

Outcome = EndStatus | Literal["stopped", "paused", "trained", "elsewhere"]

STOP_CHECK_SECONDS = 0.2

STALLED_EXIT = 75
"""Exit status of a process whose task made no progress; EX_TEMPFAIL of sysexits.h."""

MAX_REPAIRS = 8
"""How often one attempt makes damaged weights again, before it fails."""

_WEIGHTS = "final/model.safetensors"

_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


_terminated = threading.Event()
"""SIGTERM has come."""


@contextmanager
def stop_at_sigterm() -> Iterator[None]:
    """Let the tasks of the block stop at SIGTERM as if they were asked to; for a worker's process.

    Clusters send it some time before they end a process: Slurm, spot machines, a node that drains.
    A training writes a checkpoint after its step, from which it goes on elsewhere.

    Raises:
        WorkerKilled: it came.
    """
    _terminated.clear()
    previous = signal.signal(signal.SIGTERM, lambda *_: _terminated.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
    if _terminated.is_set():
        raise errors.WorkerKilled("its process was told to end (SIGTERM)")


_last_sign = 0.0
"""When a task of this process last asked whether it should stop, as all do between steps."""


def end_when_stalled() -> None:
    """End this process once its task makes no progress for `attempt.stall_seconds`.

    For a thread of a worker's process. A kernel may never end, and then no signal is handled.
    """
    begun, limit = time.monotonic(), attempt.stall_seconds()
    while (idle := time.monotonic() - max(begun, _last_sign)) < limit:
        time.sleep(limit - idle)
    os._exit(STALLED_EXIT)


class Trainable(Protocol):
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

    def measure(self, directory: Path, kept: PartialResults) -> TrialMeasurements:
        """Load the weights from ``directory`` and measure them as the experiment says.

        Args:
            kept: what an earlier attempt has measured of them; it takes what is measured now.
        """


MakeTrainable = Callable[[Trial, ReportProgress], Trainable]


class StopCheck:
    """Callable that returns whether a trial should stop. Picklable, for workers of a training.

    Args:
        flags: paths of files whose presence asks for a stop. Looked up every
            `STOP_CHECK_SECONDS` at most, however often it is called; see `attempt.Pace`.
        fences: checked at the same time; they raise LeaseLost.
    """

    def __init__(self, flags: Sequence[str | Path], fences: Sequence[Fence]):
        self._flags, self._fences = tuple(flags), fences
        self._pace, self._is_requested = attempt.Pace(STOP_CHECK_SECONDS), False

    def __call__(self) -> bool:
        global _last_sign
        _last_sign = time.monotonic()
        if _terminated.is_set():
            return True
        if not self._is_requested and self._pace.is_due():
            with self._pace.take_time():
                for fence in self._fences:
                    fence.check()
                self._is_requested = any(map(os.path.exists, self._flags))
        return self._is_requested

    def check(self) -> None:
        """Raise Stopped if the trial should stop."""
        if self():
            raise errors.Stopped("asked to stop")


def run_task(
    task: Task,
    store: str | Path,
    *,
    origin: Origin | None = None,
    stop_flags: Sequence[str | Path] = (),
    make_trainable: MakeTrainable | None = None,
    capture_output: bool = False,
    wait: bool = True,
) -> Outcome | SmokeResult | dict[str, Any]:
    """Run one trial to its end; do nothing if it has ended before. Or run another task.

    The training is skipped if its weights exist, and continued from its last checkpoint if it
    was interrupted. If another process runs this trial's training, this call waits for it. A
    failure of the trial itself is recorded and not raised. A trial that several workers train has
    a second task to measure it, with the resources of one; see `Trial.is_measurement`.

    Args:

        origin: the driver that started the trial.
        stop_flags: files whose presence asks the trial to stop at its next step.
        make_trainable: makes what trains and measures; default with torch.
        capture_output: append what this process prints to the attempt's log.
        wait: for another process that runs this trial, instead of returning ``elsewhere``.

    Returns:
        How a trial ended. ``stopped``, ``paused`` (at ``trial.until``) and ``trained`` (by several
        workers, one of which is to measure) leave no result, and the next run continues the
        trial. ``elsewhere``: another process has the trial, or has taken it over from this one.
        Of another task what it found; see `run_smoke_test` and `run_joint_timing`.

    Raises:
        StoreError: nothing can be recorded, as when the disk is full.
        CodeChanged: this process runs other code than the driver.
    """
    fences = list[Fence]()
    should_stop = StopCheck(stop_flags, fences)
    if origin is not None and origin.code not in (None, this_code()._asdict()):
        text = "the code is not what it was when this submit began: it was edited, or a machine"
        raise errors.CodeChanged(f"{text} has another version of kvlab")
    if isinstance(task, SmokeTest):
        return run_smoke_test(task)
    if isinstance(task, JointTiming):
        return run_joint_timing(task, should_stop.check)
    record = Store(store)
    try:
        lock = record.trial_lock(task.id)
        with lock.hold(None if wait else 0.0, on_wait=should_stop.check) as fence:
            if fence is None:
                return "elsewhere"
            fences.append(fence)
            healed = heal_directory(record.trial_directory(task.id), fence)
            status = record.status(task.id)
            if status == "pruned":
                record.archive_result(task.id)
            elif status is not None and status != "damaged":
                return status
            should_stop.check()
            own = _TrialAttempt(task, record, fences, should_stop, make_trainable)
            own.log_healed(healed)
            return own.run(origin or Origin(), capture_output)
    except errors.Stopped:
        return "stopped"
    except errors.LeaseLost:
        return "elsewhere"


class _TrialAttempt:
    """One attempt at a trial, by the process that holds the trial's lock.

    Args:
        fences: of the locks that this attempt holds: the trial's, and the training's beside it.
    """

    def __init__(
        self,
        trial: Trial,
        store: Store,
        fences: list[Fence],
        should_stop: StopCheck,
        make_trainable: MakeTrainable | None,
    ):
        self.trial, self.store = trial, store
        self.fence, self.fences, self.should_stop = fences[0], fences, should_stop
        if make_trainable is None:
            from kvlab.trial.torch_trainable import TorchTrainable

            make_trainable = TorchTrainable
        self.make_trainable = make_trainable
        store.write_trial(trial.id, describe_trial(trial), self.fence)
        self.attempt = attempt.Attempt(store, trial.id, self.fence)
        self.log = self.attempt.log
        self.log(f"attempt {self.attempt.number} at trial {trial.id}, training {trial.training_id}")
        self.progress_path = store.trial_directory(trial.id) / "progress.json"
        self.partial_folder = store.trial_directory(trial.id) / "partial"
        self.report = attempt.ProgressReporter(self.progress_path, self.log, self.fence)

    def run(self, origin: Origin, capture_output: bool) -> Outcome:
        """Train, measure, and record how that ends, unless by a stop or a broken store.

        Weights that prove damaged are made again, and it begins anew.
        """
        trial, repairs = self.trial, 0
        damage: Exception | None = None
        directory = self.store.training_directory(trial.training_id)
        with ExitStack() as stack:
            stack.callback(self.remove_progress)
            stack.enter_context(attempt.log_warnings(self.attempt))
            if capture_output:
                stack.enter_context(attempt.redirect_output(self.attempt.log_path))
            while True:
                try:
                    if isinstance(damage, errors.SourceDamaged):
                        self.repair_source(trial)
                    trainable = self.make_trainable(trial, self.report_and_check_stop)
                    is_damaged = isinstance(damage, errors.RecordDamaged)
                    with self.open_training(trial, check_contents=is_damaged) as fence:
                        if fence is not None:
                            trainable.train(directory, self.should_stop, fence)
                    self.should_stop.check()
                    if trial.resources.training_workers > 1:
                        self.log("trained by all workers; one of them measures")
                        self.attempt.mark_paused()
                        return "trained"
                    kept = self.open_partial_results(origin)
                    self.record_result(origin, trainable.measure(directory, kept))
                    self.log("done")
                    return "done"
                except (errors.SourceDamaged, errors.RecordDamaged) as error:
                    damage, repairs = error, repairs + 1
                    if repairs > MAX_REPAIRS:
                        return self.end_early(origin, error)
                    self.check_fences()
                    self.log(str(error))
                except Exception as error:
                    return self.end_early(origin, error)

    def end_early(self, origin: Origin, error: Exception) -> Outcome:
        """Record the error that an attempt has ended with, or raise what leaves no result."""
        match error:
            case errors.Stopped():
                self.log("stopped; submit again to continue from the last checkpoint")
                raise error
            case errors.Paused():
                self.log(str(error))
                self.attempt.mark_paused()
                return "paused"
            case errors.LeaseLost():
                self.log(f"given up: {error}")
                raise error
        self.check_fences()
        if self.trial.resources.shares_gpu and is_device_fault(error):
            error = errors.WorkerKilled(f"the GPU that it shares failed: {summarize_error(error)}")
        match error:
            case errors.StoreError():
                raise error
            case errors.WorkerKilled():
                self.log(f"{error}; the driver decides whether it runs again")
                raise error
            case OSError(errno=code) if code in _DISK_FULL_CODES:
                with explain_write_errors(self.store.path):
                    raise error
        failure = Failure.from_error(error, self.attempt.write_traceback(traceback.format_exc()))
        status: EndStatus = "diverged" if failure.kind == "diverged" else "failed"
        provenance = describe_origin(self.trial, self.store, origin, self.attempt.started)
        result = build_result(self.trial, status, provenance, failure=failure)
        self.store.write_result(result, self.fence)
        shutil.rmtree(self.partial_folder, ignore_errors=True)
        self.log(f"{status} ({failure.kind}): {failure.type}: {failure.message}")
        return status

    def log_healed(self, damages: Iterable[Damage]) -> None:
        for damage in damages:
            self.attempt.log_repair(str(damage))

    def remove_progress(self) -> None:
        if self.fence.holds():
            self.progress_path.unlink(missing_ok=True)

    @contextmanager
    def open_training(self, trial: Trial, *, check_contents: bool) -> Iterator[Fence | None]:
        """Hold a training, which one process at a time may do; the others wait for its end.

        Args:
            check_contents: read the weights of a training that is done, and train again if they
                are damaged. Otherwise whoever loads them finds out.

        Yields:
            The fence of its lock if the block is to train; None if the training is done.
        """
        training, directory = trial.training_id, self.store.training_directory(trial.training_id)
        with self.hold_training(training) as fence:
            self.log_healed(heal_directory(directory, fence, contents=check_contents))
            # first: where a search is made again, the training may have gone on after this rung
            if trial.until is not None and trial.until in self.store.rungs(training):
                raise errors.Paused(f"its training has paused after step {trial.until} before")
            if self.store.is_trained(training):
                yield None
                return
            if trial.is_measurement:
                raise errors.WorkerKilled("its weights are gone; all of its workers train again")
            earlier = self.store.earlier_training_record(training)
            message = self.store.divergence(training)
            if message is not None:
                raise errors.Diverged(message)
            source = trial.source_training
            if source is not None and not self.store.is_trained(source.training_id):
                raise errors.SourceDamaged(explain_missing_source(source, self.store))
            write_sealed_json(directory / "config.json", trial.training_identity(), fence=fence)
            if trial.initial_weights is not None:  # the record of which may be gone
                self.log_healed(heal_directory(directory, fence, contents=False))
            try:
                yield fence
            except errors.Diverged as error:
                code = dict.fromkeys((*self.store.training_code(training), this_code().training))
                self.store.write_divergence(training, str(error), [*code], fence)
                raise
            if earlier is not None:  # its weights were lost
                self.attempt.log_repair(_compare_training(directory, earlier, fence))

    @contextmanager
    def hold_training(self, training: str) -> Iterator[Fence]:
        """Hold the lock of a training, waiting for a process that has it as long as it works."""
        lock = self.store.training_lock(training)
        directory = self.store.training_directory(training)
        watch = attempt.StallWatch((directory, directory / "checkpoints"))

        def report_waiting() -> None:
            self.should_stop.check()
            watch.check(lock)
            note = lock.describe_wait(f"runs training {training}")
            self.report({"stage": "waiting", "note": note})

        with lock.hold(on_wait=report_waiting) as fence:
            assert fence is not None, "acquired without a time limit"
            self.fences.append(fence)
            try:
                yield fence
            except Exception:
                self.check_fences()
                raise
            finally:
                self.fences.remove(fence)

    def repair_source(self, trial: Trial) -> None:
        """Make the weights again that a training starts from, if they are damaged or gone.

        The trials that were measured on them stay. This trial's resources are used, which the
        process has; they are no part of what is computed.
        """
        source = trial.source_training
        assert source is not None, "only such a training can miss it"
        other = source.trial_with(trial.resources)
        self.log(f"makes the weights again that it starts from: {source.name}")
        try:
            trainable = self.make_trainable(other, self.report_and_check_stop)
            with self.open_training(other, check_contents=True) as fence:
                if fence is not None:
                    directory = self.store.training_directory(other.training_id)
                    trainable.train(directory, self.should_stop, fence)
        except errors.SourceDamaged:  # that one started from another, which is lost, too
            self.repair_source(other)
            raise
        except errors.Diverged:
            raise errors.SourceMissing(explain_missing_source(source, self.store)) from None

    def record_result(self, origin: Origin, measured: TrialMeasurements) -> None:
        trial, store = self.trial, self.store
        files = store.write_details(
            trial.id, items=measured.items, fence=self.fence, **measured.details
        )
        provenance = describe_origin(
            trial, store, origin, self.attempt.started, machine=measured.machine, data=measured.data
        )
        result = build_result(trial, "done", provenance, measured=measured)
        seal = store.training_seal(trial.training_id)
        store.write_result({**result, "training_seal": seal, "files": files}, self.fence)
        shutil.rmtree(self.partial_folder, ignore_errors=True)

    def open_partial_results(self, origin: Origin) -> PartialResults:
        """Return what attempts have measured of these weights by this code, before their end."""
        provenance = build_provenance(origin, started=self.attempt.started, attempts=0)
        identity = {
            "code": this_code().measurement or provenance["commit"],
            "versions": provenance["versions"],
            "kernels": provenance["kernels"],
            "training": self.store.training_seal(self.trial.training_id),
        }
        return PartialResults(self.partial_folder, identity, self.log, self.fence)

    def report_and_check_stop(self, update: ProgressUpdate) -> None:
        """Report, and check for a stop, except in training, which writes a checkpoint first."""
        self.report(update)
        if update.get("stage") != "training":
            self.should_stop.check()

    def check_fences(self) -> None:
        """Raise LeaseLost if another process has taken over, which may have caused an error."""
        for fence in self.fences:
            fence.check()


def _compare_training(directory: Path, earlier: bytes, fence: Fence) -> str:
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
