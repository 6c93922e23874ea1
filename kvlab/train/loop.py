"""`train`: one training, from its initial weights or its newest checkpoint to its final weights."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch._dynamo.utils import calculate_time_spent

from kvlab.errors import Paused, Stopped
from kvlab.fs.lease import Fence
from kvlab.model import GPT
from kvlab.model.generate import release_workspaces
from kvlab.model.kernels import malloc
from kvlab.spec.experiment import Experiment
from kvlab.train import training_record as records
from kvlab.train.checkpoint import Checkpoints, TrainingState, Trunk, resume_identity
from kvlab.train.mfu import MfuMeter
from kvlab.train.tensor_files import FINAL_WEIGHTS, load_final_weights, write_tensors
from kvlab.train.train_step import TokenSplits, TrainStepper, check_finite, check_spike

CHECKPOINT_SECONDS = 600.0
"""The time between checkpoints without ``checkpoint_every``, unless writing one takes over a
twentieth of it."""

BACKGROUND_DEVICES = frozenset({"cuda"})
"""Devices beside which a thread writes checkpoints. The copy that it writes is as large as weights
and optimizer state, which on CPU would come on top of the training's memory."""

REPORT_SECONDS = 0.5

RATE_SECONDS = 6.0
"""Time constant of the rate in progress reports, an exponential moving average of the steps."""

OnProgress = Callable[[dict[str, Any]], None]


class WeightLoader(Protocol):
    """Load initial weights that are not freshly drawn."""

    @property
    def identity(self) -> Any:
        """What the weights are, as plain data."""

    def load(self, model: GPT) -> None:
        """Replace the weights of ``model``."""


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
    trunk: Trunk | None = None,
    code: Sequence[str] = ("",),
    fence: Fence | None = None,
) -> records.TrainingRecord:
    """Train ``model`` in place as ``experiment.training`` says.

    Resumes from the newest intact checkpoint in ``directory``. On CPU, with the same number of
    threads, the weights are bitwise equal to those of an uninterrupted run. At the end the
    weights are in ``final/model.safetensors`` and the record in ``training.json``. A training that
    is finished already is loaded.

    With several workers (``resources.workers``, or GPUs) every process of a `torch.distributed`
    group calls this with the same directory. Rank zero writes and reports.

    Args:
        seed: selects the batches. Initial weights are those of ``model``, or
            ``initial_weights``.
        on_progress: gets ``stage, step, steps, loss, tokens_per_second, flops_per_second, mfu,
            peak_bytes, process_bytes, seconds_left, curves``, at most about twice per second.
        should_stop: called after every step.
        initial_weights: loaded into the model before step 0, never on a resume.
        until: pause after this step. The schedule remains that of the whole training, so a
            training that resumes is bitwise equal to one that never paused.
        trunk: checkpoints of the stable phase of wsd, shared with other token budgets: the
            training starts from the newest that is its own too, and adds those asked for.
        code: digests for the record, of the code that runs and of that which made
            ``initial_weights``.
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
    model = model.to(device)
    run = _Run(
        model, dataset, experiment, seed, directory, initial_weights, until, trunk, code, fence
    )
    record = records.load_training_record(directory)
    if record is not None and (directory / FINAL_WEIGHTS).exists():
        load_final_weights(model, directory)
    else:
        device = run.device.type
        with malloc.keep_freed_memory(device), closing(run.checkpoints):
            record = run.run(on_progress or (lambda _: None), should_stop or (lambda: False))
    if run.workers.is_rank_zero:
        run.checkpoints.remove()
    return record


@dataclass(eq=False)
class _Run:
    """One attempt at one training."""

    model: GPT
    dataset: TokenSplits
    experiment: Experiment
    seed: int
    directory: Path
    initial_weights: WeightLoader | None
    until: int | None
    trunk: Trunk | None
    code: Sequence[str]
    fence: Fence | None

    def __post_init__(self) -> None:
        self.training, self.device = self.experiment.training, self.model.device
        self.stepper = TrainStepper(self.model, self.dataset, self.experiment, self.seed)
        self.workers = self.stepper.workers
        source = self.initial_weights and self.initial_weights.identity
        tokens = len(self.dataset.train)
        self.checkpoints = Checkpoints(
            self.directory,
            resume_identity(self.experiment, self.seed, tokens, source),
            self.fence,
            self.device.type in BACKGROUND_DEVICES,
        )
        self.save_seconds = self.compile_seconds = 0.0

    def run(self, report: OnProgress, should_stop: Callable[[], bool]) -> records.TrainingRecord:
        """Take all remaining steps and write the result."""
        self.mfu_meter = MfuMeter(self.experiment, self.device, self.workers.size)
        self.memory = _PeakMemory(self.model)
        state = self.load_state()
        self.saved_step = first_step = state.step
        self.saved_at = reported_at = start = time.monotonic()
        self.share_if_due(state)  # an earlier attempt may have been killed before it did
        self.pause_if_due(state)  # an earlier attempt may have paused here or gone further
        while state.step < self.training.steps:
            self.take_step(state, is_first=state.step == first_step)
            is_last = state.step == self.training.steps
            if is_last or state.step % self.training.evaluate_every == 0:
                tokens = state.step * self.training.batch_tokens
                state.validation_curve.append([state.step, tokens, self.validate(state)])
            self.pause_if_due(state)
            if not is_last and self.workers.broadcast_decision(should_stop, self.device):
                self.save(state)
                self.checkpoints.wait()
                raise Stopped(f"asked to stop after step {state.step} of {self.training.steps}")
            if not is_last and self.is_save_due(state):
                self.save(state)
            self.checkpoints.raise_errors()
            now = time.monotonic()
            is_first = state.step == first_step + 1
            if is_last or is_first or now - reported_at >= REPORT_SECONDS:
                reported_at = now
                if self.workers.is_rank_zero:
                    report(self.progress(state, (now - start) / (state.step - first_step)))
        return self.finish(state)

    def load_state(self) -> TrainingState:
        """Resume from the newest checkpoint, branch from a trunk, or begin a new training."""
        resume = partial(self.checkpoints.resume, self.model, self.stepper.optimizer)
        state = resume()
        # every worker has looked before rank zero branches, or the last would find its checkpoint
        missing = torch.tensor(state is None, dtype=torch.int32, device=self.device)
        if self.workers.all_reduce_sum(missing).item():
            if self.initial_weights is not None and self.workers.is_rank_zero:
                self.initial_weights.load(self.model)
            if self.trunk is not None:
                stable = self.training.stable_steps
                last = stable if self.until is None else min(stable, self.until)
                branch = partial(self.checkpoints.branch, self.trunk, last)
                if self.workers.broadcast_decision(branch, self.device):
                    state = resume()
        self.stepper.connect_workers()
        state = state or TrainingState(code=[])
        state.code = list(dict.fromkeys((*state.code, *self.code)))
        return state

    def take_step(self, state: TrainingState, *, is_first: bool) -> None:
        """Take one optimizer step and record its loss and time.

        Raises:
            Diverged: the loss or gradient is not finite (before the weights change), or the
                loss stayed high after a spike.
        """
        start = time.perf_counter()
        loss = self.stepper.step(state.step)
        seconds = time.perf_counter() - start
        state.step += 1
        state.seconds += seconds
        if is_first:  # it warms up, and counts only as long as it is alone
            self.step_seconds, self.recent_steps = seconds, 0
        else:
            state.timed_seconds += seconds
            state.timed_steps += 1
            self.recent_steps += 1
            weight = min(1.0, max(1 / self.recent_steps, seconds / RATE_SECONDS))
            self.step_seconds += weight * (seconds - self.step_seconds)
        state.losses.append(loss)
        state.lowest = check_spike(state.losses, state.lowest, self.training, state.step)

    def validate(self, state: TrainingState) -> float:
        loss = self.stepper.validation_loss()
        check_finite("validation loss", loss, self.training, state.step)
        return loss

    def pause_if_due(self, state: TrainingState) -> None:
        """Pause at the rung of a search: write a checkpoint, then the loss.

        In this order a kill between them loses nothing. The loss is not added to the curve:
        rungs do not change a training's record.
        """
        if self.until is None or not self.until <= state.step < self.training.steps:
            return
        curve = state.validation_curve
        is_known = bool(curve) and curve[-1][0] == state.step
        loss = curve[-1][2] if is_known else self.validate(state)
        self.save(state)
        self.checkpoints.wait()
        if self.workers.is_rank_zero:
            records.write_rung(self.directory, self.until, state.step, loss, self.fence)
        steps = f"{state.step} of {self.training.steps}"
        raise Paused(f"paused after step {steps} at validation loss {loss:.6g}")

    def is_save_due(self, state: TrainingState) -> bool:
        if self.trunk is not None and state.step in self.trunk.steps:
            return True
        if self.training.checkpoint_every is not None:
            return state.step % self.training.checkpoint_every == 0
        interval = max(CHECKPOINT_SECONDS, 20 * self.save_seconds)
        return time.monotonic() - self.saved_at >= interval

    def save(self, state: TrainingState) -> None:
        """Write a checkpoint of this step, or begin to, and account for the time that steps wait.

        That of this checkpoint itself is not known when it is written: the next one has it.
        """
        if state.step > self.saved_step:
            start = time.monotonic()
            self.count_compiling(state)
            if self.workers.is_rank_zero:
                self.checkpoints.save(self.model, self.stepper.optimizer, state)
            self.saved_step, self.saved_at = state.step, time.monotonic()
            self.save_seconds = self.saved_at - start
            state.checkpoint_seconds += self.save_seconds
        self.share_if_due(state)

    def count_compiling(self, state: TrainingState) -> None:
        """Add the seconds of compiling since the last call, or since `torch.compiler.reset`."""
        if self.training.compile:
            seconds = calculate_time_spent()["total_wall_time"]
            state.compile_seconds += seconds - self.compile_seconds
            self.compile_seconds = seconds

    def share_if_due(self, state: TrainingState) -> None:
        """Give the trunk the checkpoint of this step, if another token budget branches here."""
        if self.trunk is not None and state.step in self.trunk.steps and self.workers.is_rank_zero:
            start = time.monotonic()
            self.checkpoints.wait()
            state.checkpoint_seconds += time.monotonic() - start
            self.checkpoints.share(state.step, self.trunk)

    def finish(self, state: TrainingState) -> records.TrainingRecord:
        """Write the weights, then the record. In this order a kill between them loses nothing."""
        self.count_compiling(state)
        # the first step of an attempt warms up, and counts only if there is no other
        timed = (state.timed_steps, state.timed_seconds)
        steps, seconds = timed if state.timed_steps else (state.step, state.seconds)
        rate = steps * self.training.batch_tokens / seconds if seconds else 0.0
        record = records.TrainingRecord(
            steps=state.step,
            tokens=state.step * self.training.batch_tokens,
            seconds=state.seconds,
            tokens_per_second=rate,
            train_curve=records.mean_curve(state.losses, state.step, self.training.batch_tokens),
            validation_curve=state.validation_curve,
            resumed_from=state.resumed_from,
            branched_at=state.branched_at,
            code=state.code,
            checkpoint_seconds=state.checkpoint_seconds,
            compile_seconds=state.compile_seconds,
            attention="; ".join(sorted(self.stepper.attention or ())) or None,
            peak_bytes=self.memory.peak_bytes(),
            products=self.stepper.describe_products(),
            workers=self.workers.size,
            peak_flops_per_second=self.mfu_meter.peak,
            peak_flops_origin=self.mfu_meter.origin,
            **self.mfu_meter.rates(rate),
        )
        if self.workers.is_rank_zero:
            parameters = dict(self.model.named_parameters())
            write_tensors(self.directory / FINAL_WEIGHTS, parameters, self.fence)
            records.write_training_record(self.directory, record, self.fence)
        return record

    def progress(self, state: TrainingState, seconds_per_step: float) -> dict[str, Any]:
        rate = self.training.batch_tokens / self.step_seconds
        return {
            "stage": "training",
            "step": state.step,
            "steps": self.training.steps,
            "loss": state.losses[-1],
            "tokens_per_second": rate,
            **self.mfu_meter.rates(rate),
            "peak_bytes": self.memory.peak_bytes(),
            "process_bytes": self.memory.process_bytes(),
            "seconds_left": seconds_per_step * (self.training.steps - state.step),
            "curves": {
                "train_loss": records.mean_curve(
                    state.losses, state.step, self.training.batch_tokens, records.PROGRESS_POINTS
                ),
                "validation_loss": list(state.validation_curve),
            },
        }


class _PeakMemory:
    """The most memory that a training holds, the quantity that `training_peak_bytes` predicts.

    On CUDA PyTorch's allocator counts it. On CPU it is the growth of the process since before the
    first step, and the weights, which were there. Pages of files are left out: the system takes
    them back when it needs them.

    Args:
        model: With its weights, and nothing else of the training yet.
    """

    def __init__(self, model: GPT):
        self._device = model.device
        if self._device.type == "cuda":
            release_workspaces()  # of an earlier trial of this process
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        self._weight_bytes = sum(weight.nbytes for weight in model.parameters())
        malloc.return_free_memory()
        self._has_kernel_peak = malloc.reset_resident_peak()
        self._before = self._most = _own_bytes()

    def peak_bytes(self) -> int:
        """Return the most so far. A system that keeps no peak is asked at each call alone."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        own = _own_bytes()
        if self._has_kernel_peak:
            own += malloc.read_status_bytes("VmHWM") - malloc.read_status_bytes("VmRSS")
        self._most = max(self._most, own)
        return self._most - self._before + self._weight_bytes

    def process_bytes(self) -> int | None:
        """Return the size of the whole process on CPU, with Python and PyTorch themselves."""
        return None if self._device.type == "cuda" else psutil.Process().memory_info().rss


def _own_bytes() -> int:
    """Return the resident bytes of this process that no file has."""
    try:
        return malloc.read_status_bytes("RssAnon")
    except OSError:  # not Linux
        return psutil.Process().memory_info().rss
