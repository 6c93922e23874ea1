"""The training loop."""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvlab.data import training_batch, validation_batches
from kvlab.errors import Diverged, Stopped
from kvlab.model import GPT
from kvlab.model.loss import summed_loss
from kvlab.spec.experiment import Experiment
from kvlab.train.beginning import Beginning
from kvlab.train.checkpoint import Checkpoints, State, run_identity
from kvlab.train.microbatch import microbatch_rows
from kvlab.train.optimizer import make_optimizer, set_learning_rate
from kvlab.train.record import CURVE_POINTS, TrainingRecord, load_training, write_training
from kvlab.train.schedule import learning_rate
from kvlab.train.weights import FINAL, load_weights, write_tensors

CHECKPOINT_SECONDS = 60.0
"""The most time between checkpoints, unless writing one takes longer than a twentieth of it."""

REPORT_SECONDS = 0.5

OnProgress = Callable[[dict[str, Any]], None]


class Tokens(Protocol):
    """What training needs of a dataset: 1-D arrays of token ids."""

    @property
    def train(self) -> np.ndarray[Any, Any]: ...

    @property
    def validation(self) -> np.ndarray[Any, Any]: ...


def train(
    model: GPT,
    dataset: Tokens,
    experiment: Experiment,
    *,
    seed: int,
    directory: str | Path,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
    beginning: Beginning | None = None,
) -> TrainingRecord:
    """Trains ``model`` in place as ``experiment.training`` says; see `TrainingRecord`.

    Goes on from the newest whole checkpoint in ``directory``; on CPU, with as many threads, the
    weights come out bitwise as if there had been no interruption. At the end the weights are in
    ``final/model.safetensors``, the record in ``training.json``, and no checkpoints are left.
    If all of that is there already, it is loaded.

    Args:
        seed: picks the batches; the initial weights are the model's own, but for `beginning`.
        on_progress: gets ``stage, step, steps, loss, tokens_per_second, seconds_left``, at most
            about twice a second.
        should_stop: asked after every step.
        beginning: gives the model other first weights, before step 0 and never on a resume.

    Raises:
        Stopped: ``should_stop()`` was true; a checkpoint is written.
        Diverged: the loss or the gradient is NaN or infinite.
        StoreError: the directory cannot be written, or holds another training.
        DataError: a split has too few tokens.
    """
    directory = Path(directory)
    run = _Run(model.to(device), dataset, experiment, seed, directory, beginning)
    record = load_training(directory)
    if record is not None and (directory / FINAL).exists():
        load_weights(model, directory)
    else:
        record = run.steps(on_progress or (lambda _: None), should_stop or (lambda: False))
    run.checkpoints.remove()
    return record


class _Run:
    """One attempt at one training."""

    def __init__(
        self,
        model: GPT,
        dataset: Tokens,
        experiment: Experiment,
        seed: int,
        directory: Path,
        beginning: Beginning | None,
    ):
        self.model, self.dataset, self.seed, self.directory = model, dataset, seed, directory
        self.training, self.block = experiment.training, experiment.model.block_size
        self.device = model.device
        self.rows = self.training.batch_tokens // self.block
        self.micro = microbatch_rows(experiment, self.device)
        self.optimizer = make_optimizer(model, self.training)
        self.hidden: Callable[[Tensor], Tensor] = model.hidden
        if self.training.compile:
            # a process that trains many models would run into the limit on recompiling
            torch.compiler.reset()
            self.hidden = torch.compile(model.hidden)
        self.beginning = beginning
        source = beginning and beginning.identity
        identity = run_identity(experiment, seed, len(dataset.train), source)
        self.checkpoints = Checkpoints(directory, identity)
        self.saved_step = 0
        self.save_seconds = 0.0

    def steps(self, report: OnProgress, should_stop: Callable[[], bool]) -> TrainingRecord:
        """All steps that are left, and what comes after the last."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        state = self.checkpoints.resume(self.model, self.optimizer)
        if state is None:
            state = State()
            if self.beginning is not None:
                self.beginning.apply(self.model)
        self.saved_step = state.step
        self.saved_at = self.reported_at = began = time.monotonic()
        first = state.step
        while state.step < self.training.steps:
            self.step(state, is_first=state.step == first)
            self.validate_if_due(state)
            is_last = state.step == self.training.steps
            if not is_last and should_stop():
                self.save(state)
                raise Stopped(f"asked to stop after step {state.step} of {self.training.steps}")
            if not is_last and self.is_save_due(state):
                self.save(state)
            now = time.monotonic()
            if is_last or state.step == first + 1 or now - self.reported_at >= REPORT_SECONDS:
                self.reported_at = now
                report(self.progress(state, (now - began) / (state.step - first)))
        return self.finish(state)

    def step(self, state: State, *, is_first: bool) -> None:
        """One optimizer step.

        Raises:
            Diverged: before the weights are touched.
        """
        began = time.perf_counter()
        set_learning_rate(self.optimizer, learning_rate(self.training, state.step))
        self.optimizer.zero_grad()
        loss = self.gradient(state.step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        value, length = torch.stack([loss, norm]).tolist()  # one wait for the device
        self.check("loss", value, state)
        self.check("gradient's norm", length, state)
        self.optimizer.step()
        seconds = time.perf_counter() - began
        state.step += 1
        state.seconds += seconds
        if not is_first:
            state.timed_seconds += seconds
            state.timed_steps += 1
        self.note_loss(state, value)

    def gradient(self, step: int) -> Tensor:
        """Adds up the gradient of the mean loss of the step's tokens; returns that loss."""
        x, y = self.batch(step)
        total = torch.zeros((), device=self.device)
        for start in range(0, self.rows, self.micro):
            part = slice(start, start + self.micro)
            loss = self.loss(self.hidden, x[part], y[part]) / x.numel()
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (rows, block) of a step: the same whatever happened before."""
        x, y = training_batch(
            self.dataset.train,
            seed=self.seed,
            step=step,
            batch_size=self.rows,
            block_size=self.block,
        )
        return self.on_device(x), self.on_device(y)

    def loss(self, hidden: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
        """The summed loss of some rows, in the training's precision."""
        reduced = self.training.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=reduced):
            weight = self.model.lm_head.weight
            return summed_loss(hidden(x), weight, y, compile=self.training.compile)

    def on_device(self, tokens: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(tokens)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def note_loss(self, state: State, loss: float) -> None:
        """A point of the curve is the mean over the steps since the last."""
        every = max(1, self.training.steps // CURVE_POINTS)
        state.pending.append(loss)
        if state.step % every == 0 or state.step == self.training.steps:
            mean = math.fsum(state.pending) / len(state.pending)
            state.train_curve.append([state.step, self.tokens(state), mean])
            state.pending = []

    def validate_if_due(self, state: State) -> None:
        if state.step % self.training.evaluate_every == 0 or state.step == self.training.steps:
            loss = self.validation_loss()
            self.check("validation loss", loss, state)
            state.validation_curve.append([state.step, self.tokens(state), loss])

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean nats a token over the first ``evaluate_tokens``, in the training's precision."""
        batches = validation_batches(
            self.dataset.validation,
            tokens_wanted=self.training.evaluate_tokens,
            block_size=self.block,
            batch_size=self.micro,
        )
        total, count = 0.0, 0
        for x, y in batches:
            # the compiled model is for full batches: another shape would compile again
            hidden = self.hidden if len(x) == self.micro else self.model.hidden
            total += float(self.loss(hidden, self.on_device(x), self.on_device(y)))
            count += x.size
        return total / count

    def check(self, name: str, value: float, state: State) -> None:
        if not math.isfinite(value):
            place = f"at step {state.step} of {self.training.steps}"
            text = f"the {name} is {value} {place}, with learning_rate ="
            way_out = "lower it, or lengthen warmup_tokens"
            raise Diverged(f"{text} {self.training.learning_rate:g}; {way_out}")

    def is_save_due(self, state: State) -> bool:
        apart = max(CHECKPOINT_SECONDS, 20 * self.save_seconds)
        by_time = time.monotonic() - self.saved_at >= apart
        return by_time or state.step % self.training.checkpoint_every == 0

    def save(self, state: State) -> None:
        if state.step > self.saved_step:
            began = time.monotonic()
            self.checkpoints.save(self.model, self.optimizer, state)
            self.saved_step, self.saved_at = state.step, time.monotonic()
            self.save_seconds = self.saved_at - began

    def finish(self, state: State) -> TrainingRecord:
        """Writes the weights, then the record: in this order a kill between them loses nothing."""
        write_tensors(self.directory / FINAL, dict(self.model.named_parameters()))
        record = TrainingRecord(
            steps=state.step,
            tokens=self.tokens(state),
            seconds=state.seconds,
            tokens_per_second=self.rate(state),
            train_curve=state.train_curve,
            validation_curve=state.validation_curve,
            resumed_from=state.resumed_from,
            peak_bytes=_peak_bytes(self.device),
        )
        write_training(self.directory, record)
        return record

    def progress(self, state: State, seconds_a_step: float) -> dict[str, Any]:
        curve = state.train_curve
        return {
            "stage": "training",
            "step": state.step,
            "steps": self.training.steps,
            "loss": state.pending[-1] if state.pending else curve[-1][2],
            "tokens_per_second": self.rate(state),
            "seconds_left": seconds_a_step * (self.training.steps - state.step),
        }

    def tokens(self, state: State) -> int:
        return state.step * self.training.batch_tokens

    def rate(self, state: State) -> float:
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
