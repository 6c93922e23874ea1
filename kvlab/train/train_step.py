"""One optimizer step, and the validation loss: the mathematics of training, without its files."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from kvlab.data import get_training_batch, iter_validation_batches
from kvlab.layout.training_memory import microbatch_rows as rows_for
from kvlab.model import GPT
from kvlab.model.loss import summed_loss
from kvlab.spec.experiment import Experiment
from kvlab.train.distributed import WorkerGroup
from kvlab.train.divergence import check_finite
from kvlab.train.optimizer import learning_rate, make_optimizer, set_learning_rate


class TokenSplits(Protocol):
    """What training needs of a dataset: 1-D arrays of token ids."""

    @property
    def train(self) -> np.ndarray[Any, Any]: ...

    @property
    def validation(self) -> np.ndarray[Any, Any]: ...


class SummedLoss(nn.Module):
    """(rows, block) tokens and targets -> the summed loss, in the training's precision."""

    def __init__(self, model: GPT, precision: str, compile: bool, document_start: int | None):
        super().__init__()
        self.document_start = document_start
        self.model, self.compiles = model, compile
        self.reduced = precision == "bfloat16"
        self._hidden_states: Callable[..., Tensor] = model.hidden_states
        if compile:
            # a process that trains many models would run into the limit on recompiling
            torch.compiler.reset()
            self._hidden_states = torch.compile(model.hidden_states)

    def forward(self, x: Tensor, y: Tensor, eager: bool = False) -> Tensor:
        """``eager``: for another shape than the usual, which would compile again."""
        hidden = self.model.hidden_states if eager else self._hidden_states
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.reduced):
            return summed_loss(
                hidden(x, document_start=self.document_start),
                self.model.lm_head.weight,
                y,
                compile=self.compiles,
            )


class TrainStepper:
    """The steps of one training on this worker; ``model`` is trained in place."""

    def __init__(self, model: GPT, dataset: TokenSplits, experiment: Experiment, seed: int):
        self.model, self.dataset, self.seed = model, dataset, seed
        self.training, self.block = experiment.training, experiment.model.block_size
        self.device = model.device
        self.workers = WorkerGroup.here(experiment.resources.training_workers)
        self.rows = self.training.batch_tokens // self.block
        self.micro = device_microbatch_rows(experiment, self.device)
        self.optimizer = make_optimizer(model, self.training)
        self.loss = SummedLoss(
            model,
            self.training.precision,
            self.training.compile,
            experiment.data.document_start,
        )
        self.shared: nn.Module = self.loss

    def join(self) -> None:
        """Makes the workers one, starting from the leader's weights."""
        self.shared = self.workers.wrapped(self.loss, self.device)

    def step(self, step: int) -> float:
        """The optimizer step ``step``; returns its mean loss.

        Raises:
            Diverged: loss or gradient is no number; before the weights are touched.
        """
        set_learning_rate(self.optimizer, learning_rate(self.training, step))
        self.optimizer.zero_grad()
        loss = self.gradient(step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        value, length = torch.stack([loss, norm]).tolist()  # one wait for the device
        check_finite("loss", value, self.training, step)
        check_finite("gradient's norm", length, self.training, step)
        self.optimizer.step()
        return float(value)

    def gradient(self, step: int) -> Tensor:
        """Adds up the gradient of the mean loss of the step's tokens; returns that loss."""
        x, y = self.batch(step)
        total = torch.zeros((), device=self.device)
        for start in range(0, len(x), self.micro):
            part = slice(start, start + self.micro)
            is_last = start + self.micro >= len(x)
            with self.workers.gradients_later(self.shared, is_last):
                # workers' gradients are averaged, and so are these means over their own tokens
                loss = self.shared(x[part], y[part]) / x.numel()
                loss.backward()
            total += loss.detach()
        return self.workers.summed(total) / self.workers.size

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This worker's tokens and targets (rows, block) of a step, whatever happened before."""
        x, y = get_training_batch(
            self.dataset.train,
            seed=self.seed,
            step=step,
            batch_size=self.rows,
            block_size=self.block,
            rows=self.workers.share(self.rows),
        )
        return self.on_device(x), self.on_device(y)

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Mean nats a token over the first ``evaluate_tokens``, in the training's precision."""
        batches = iter_validation_batches(
            self.dataset.validation,
            tokens_wanted=self.training.evaluate_tokens,
            block_size=self.block,
            batch_size=self.micro,
        )
        found = torch.zeros(2, dtype=torch.float64)
        for number, (x, y) in enumerate(batches):
            if number % self.workers.size == self.workers.rank:
                eager = len(x) != self.micro
                loss = float(self.loss(self.on_device(x), self.on_device(y), eager))
                found += torch.tensor([loss, x.size], dtype=torch.float64)
        if self.workers.size > 1:
            found = self.workers.summed(found.to(self.device))
        total, count = found.tolist()
        return float(total / count)

    def on_device(self, tokens: np.ndarray[Any, Any]) -> Tensor:
        tensor = torch.from_numpy(tokens)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


# How many rows of a step go through the model at once. Same mathematics, other memory.


def device_microbatch_rows(experiment: Experiment, device: torch.device) -> int:
    """Rows of ``block_size`` tokens in one forward pass; divides a worker's rows of a step.

    ``resources.microbatch_tokens`` if given. It depends on the experiment and the kind of
    device alone, so that a resumed run sums in the same order.
    """
    memory = None
    if device.type == "cuda":
        share = min(1.0, experiment.resources.devices)
        memory = int(torch.cuda.get_device_properties(device).total_memory * share)
    return rows_for(experiment, memory)
