"""`train`: one training, from its initial weights or its newest checkpoint to its final weights."""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from kvlab.errors import Paused, Stopped
from kvlab.fs.lease import Fence
from kvlab.model import GPT
from kvlab.model.kernels import keep_freed_memory
from kvlab.spec.experiment import Experiment
from kvlab.train.checkpoint import Checkpoints, TrainingState, resume_identity
from kvlab.train.divergence import WINDOW, check_finite, check_spike
from kvlab.train.mfu import MfuMeter
from kvlab.train.tensor_files import FINAL_WEIGHTS, load_final_weights, write_tensors
from kvlab.train.train_step import TokenSplits, TrainStepper
from kvlab.train.training_record import (
    CURVE_POINTS,
    TrainingRecord,
    load_training_record,
    write_rung,
    write_training_record,
)


class WeightLoader(Protocol):
    """Load initial weights that are not freshly drawn."""

    @property
    def identity(self) -> Any:
        """What the weights are, as plain data."""

    def load(self, model: GPT) -> None:
        """Replace the weights of ``model``."""


CHECKPOINT_SECONDS = 60.0
"""The most time between checkpoints, unless writing one takes longer than a twentieth of it."""

REPORT_SECONDS = 0.5

OnProgress = Callable[[dict[str, Any]], None]


def train(
    model: GPT,
    dataset: TokenSplits,
    experiment: Experiment,
    *,
    seed: int,
    directory: str | Path,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
    initial_weights: WeightLoader | None = None,
    until: int | None = None,
    fence: Fence | None = None,
) -> TrainingRecord:
    """Trains ``model`` in place as ``experiment.training`` says; see `TrainingRecord`.

    Goes on from the newest whole checkpoint in ``directory``; on CPU, with as many threads, the
    weights come out bitwise as if there had been no interruption. At the end the weights are in
    ``final/model.safetensors``, the record in ``training.json``, and of the checkpoints only
    the ``keep_best``. If all of that is there already, it is loaded.

    Several workers (``resources.workers``, or GPUs) each call this in a process of a
    `torch.distributed` process group, with one directory; the first of them writes and reports.

    Args:
        seed: picks the batches; the initial weights are the model's own, but for `initial_weights`.
        on_progress: gets ``stage, step, steps, loss, tokens_per_second, flops_per_second, mfu,
            peak_bytes, seconds_left``, at most about twice a second.
        should_stop: asked after every step.
        initial_weights: loaded into the model before step 0, never on a resume.
        until: pause after this step, short of the end; the schedule stays that of the whole
            training, so one that goes on comes out bitwise as if it had never paused.
        fence: of the lock on ``directory``, checked before each file is put in place.

    Raises:
        Paused: ``until`` is reached; a checkpoint and the validation loss are written.
        Stopped: ``should_stop()`` was true; a checkpoint is written.
        Diverged: the loss or the gradient is NaN or infinite, or the loss rose by
            ``training.spike``.
        ResourceError: the process group has another size than the experiment asks for.
        StoreError: the directory cannot be written, or holds another training.
        DataError: a split has too few tokens.
    """
    directory = Path(directory)
    run = _Run(model.to(device), dataset, experiment, seed, directory, initial_weights, fence)
    record = load_training_record(directory)
    if record is not None and (directory / FINAL_WEIGHTS).exists():
        load_final_weights(model, directory)
    else:
        run.until = until
        with keep_freed_memory(run.device.type):
            record = run.steps(on_progress or (lambda _: None), should_stop or (lambda: False))
    if run.stepper.workers.leads:
        run.checkpoints.remove_all_but_best()
    return record


class _Run:
    """One attempt at one training."""

    def __init__(
        self,
        model: GPT,
        dataset: TokenSplits,
        experiment: Experiment,
        seed: int,
        directory: Path,
        initial_weights: WeightLoader | None,
        fence: Fence | None,
    ):
        self.stepper = TrainStepper(model, dataset, experiment, seed)
        self.experiment, self.training = experiment, experiment.training
        self.device, self.directory = model.device, directory
        self.initial_weights, self.fence = initial_weights, fence
        source = initial_weights and initial_weights.identity
        identity = resume_identity(experiment, seed, len(dataset.train), source)
        self.checkpoints = Checkpoints(
            directory, identity, self.training.keep_last, self.training.keep_best, fence
        )
        self.until: int | None = None
        self.saved_step = 0
        self.save_seconds = 0.0

    def steps(self, report: OnProgress, should_stop: Callable[[], bool]) -> TrainingRecord:
        """All steps that are left, and what comes after the last."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        workers = self.stepper.workers
        state = self.begin()
        self.accountant = MfuMeter(self.experiment, self.device, workers.size)
        self.saved_step = state.step
        self.saved_at = self.reported_at = began = time.monotonic()
        first = state.step
        self.pause_if_due(state)  # one that paused, or went further, before
        while state.step < self.training.steps:
            self.step(state, is_first=state.step == first)
            self.validate_if_due(state)
            self.pause_if_due(state)
            is_last = state.step == self.training.steps
            if not is_last and workers.agree(should_stop, self.device):
                self.save(state)
                raise Stopped(f"asked to stop after step {state.step} of {self.training.steps}")
            if self.is_save_due(state, is_last):
                self.save(state)
            now = time.monotonic()
            if is_last or state.step == first + 1 or now - self.reported_at >= REPORT_SECONDS:
                self.reported_at = now
                if workers.leads:
                    report(self.progress(state, (now - began) / (state.step - first)))
        return self.finish(state)

    def begin(self) -> TrainingState:
        """The state of the newest checkpoint, or of a training that begins."""
        state = self.checkpoints.resume(self.stepper.model, self.stepper.optimizer)
        if state is None:
            state = TrainingState()
            if self.initial_weights is not None and self.stepper.workers.leads:
                self.initial_weights.load(self.stepper.model)
        self.stepper.join()
        return state

    def step(self, state: TrainingState, *, is_first: bool) -> None:
        """One optimizer step.

        Raises:
            Diverged: before the weights are touched, or after a spike that lasts.
        """
        began = time.perf_counter()
        loss = self.stepper.step(state.step)
        seconds = time.perf_counter() - began
        state.step += 1
        state.seconds += seconds
        if not is_first:
            state.timed_seconds += seconds
            state.timed_steps += 1
        self.note_loss(state, loss)

    def note_loss(self, state: TrainingState, loss: float) -> None:
        """A point of the curve is the mean over the steps since the last."""
        every = max(1, self.training.steps // CURVE_POINTS)
        state.pending.append(loss)
        state.recent = [*state.recent, loss][-WINDOW:]
        state.lowest = check_spike(state.recent, state.lowest, self.training, state.step)
        if state.step % every == 0 or state.step == self.training.steps:
            mean = math.fsum(state.pending) / len(state.pending)
            state.train_curve.append([state.step, self.tokens(state), mean])
            state.pending = []

    def validate_if_due(self, state: TrainingState) -> None:
        if state.step % self.training.evaluate_every == 0 or state.step == self.training.steps:
            loss = self.stepper.validation_loss()
            check_finite("validation loss", loss, self.training, state.step)
            state.validation_curve.append([state.step, self.tokens(state), loss])

    def pause_if_due(self, state: TrainingState) -> None:
        """At the rung: a checkpoint, then the loss; a kill between them loses nothing.

        The loss enters the curve only where the curve has a point anyway: rungs change nothing
        of a training's record.
        """
        if self.until is None or not self.until <= state.step < self.training.steps:
            return
        curve = state.validation_curve
        loss = curve[-1][2] if curve and curve[-1][0] == state.step else None
        if loss is None:
            loss = self.stepper.validation_loss()
            check_finite("validation loss", loss, self.training, state.step)
        self.save(state)
        if self.stepper.workers.leads:
            write_rung(self.directory, self.until, state.step, loss, self.fence)
        steps = f"{state.step} of {self.training.steps}"
        raise Paused(f"paused after step {steps} at validation loss {loss:.6g}")

    def is_save_due(self, state: TrainingState, is_last: bool) -> bool:
        if is_last or self.is_among_best(state):
            return self.is_among_best(state)
        apart = max(CHECKPOINT_SECONDS, 20 * self.save_seconds)
        by_time = time.monotonic() - self.saved_at >= apart
        return by_time or state.step % self.training.checkpoint_every == 0

    def is_among_best(self, state: TrainingState) -> bool:
        """Whether a checkpoint of this step would be kept for its validation loss."""
        curve, keep = state.validation_curve, self.training.keep_best
        if not keep or not curve or curve[-1][0] != state.step:
            return False
        return sum(point[2] <= curve[-1][2] for point in curve) <= keep

    def save(self, state: TrainingState) -> None:
        if state.step > self.saved_step:
            began = time.monotonic()
            if self.stepper.workers.leads:
                self.checkpoints.save(self.stepper.model, self.stepper.optimizer, state)
            self.saved_step, self.saved_at = state.step, time.monotonic()
            self.save_seconds = self.saved_at - began

    def finish(self, state: TrainingState) -> TrainingRecord:
        """Writes the weights, then the record: in this order a kill between them loses nothing."""
        rate, accountant = self.rate(state), self.accountant
        record = TrainingRecord(
            steps=state.step,
            tokens=self.tokens(state),
            seconds=state.seconds,
            tokens_per_second=rate,
            train_curve=state.train_curve,
            validation_curve=state.validation_curve,
            resumed_from=state.resumed_from,
            peak_bytes=_peak_bytes(self.device),
            **accountant.facts(rate),
        )
        if self.stepper.workers.leads:
            parameters = dict(self.stepper.model.named_parameters())
            write_tensors(self.directory / FINAL_WEIGHTS, parameters, self.fence)
            write_training_record(self.directory, record, self.fence)
        return record

    def progress(self, state: TrainingState, seconds_a_step: float) -> dict[str, Any]:
        curve = state.train_curve
        return {
            "stage": "training",
            "step": state.step,
            "steps": self.training.steps,
            "loss": state.pending[-1] if state.pending else curve[-1][2],
            "tokens_per_second": self.rate(state),
            "flops_per_second": self.accountant.flops_per_second(self.rate(state)),
            "mfu": self.accountant.mfu(self.rate(state)),
            "peak_bytes": _peak_bytes(self.device),
            "seconds_left": seconds_a_step * (self.training.steps - state.step),
        }

    def tokens(self, state: TrainingState) -> int:
        return state.step * self.training.batch_tokens

    def rate(self, state: TrainingState) -> float:
        """Tokens a second in steps alone; of a single step, with its warm-up."""
        steps, seconds = state.timed_steps, state.timed_seconds
        if not steps:
            steps, seconds = state.step, state.seconds
        return steps * self.training.batch_tokens / seconds if seconds else 0.0


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
