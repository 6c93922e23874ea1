"""One optimizer step and the validation loss: the mathematics of training without its files.

Shapes: R rows of a step, T tokens of a block.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from kvlab.cache.uncached_passes import KVReads
from kvlab.data.batches import find_targets, get_training_batch, spread_windows
from kvlab.errors import Diverged, ResourceError
from kvlab.layout.training_memory import microbatch_rows
from kvlab.model import GPT
from kvlab.model.attention_backends import record_kernels
from kvlab.model.generate import remove_torn_libraries
from kvlab.model.kernels.cpu_kernel import use_plain_code
from kvlab.model.kernels.linear import LinearProducts
from kvlab.model.loss import summed_loss
from kvlab.own_extensions import find_members
from kvlab.spec import TrainingConfig
from kvlab.spec.experiment import Experiment
from kvlab.spec.training_config import OPTIMIZERS

WINDOW = 32
"""Steps whose mean loss is compared. A spike that passes sooner is noise."""


READ_AHEAD_DEVICES = frozenset({"cuda"})
"""Devices beside which a thread reads the text of the next step, which may come from a slow disk.
6 ms were measured for 512 rows of text in memory."""

Batch = tuple[Tensor, Tensor]


class TokenSplits(Protocol):
    """The splits of a dataset: 1-D arrays of token ids."""

    @property
    def train(self) -> np.ndarray[Any, Any]: ...

    @property
    def validation(self) -> np.ndarray[Any, Any]: ...


class SummedLoss(nn.Module):
    """The summed loss of tokens and targets (R, T), in the training's precision.

    Args:
        target_ids: the ids of targets that count; None for all.

    Attributes:
        products: of extensions, by name: computes linear layers; None if it does not.
    """

    def __init__(
        self,
        model: GPT,
        training: TrainingConfig,
        document_start: int | None,
        target_ids: tuple[range, ...] | None = None,
    ):
        super().__init__()
        self.document_start, self.target_ids = document_start, target_ids
        self.model, self.compiles = model, training.compile
        self.uses_autocast = training.precision == "bfloat16"
        self.residual_dtype = torch.bfloat16 if training.residual == "bfloat16" else None
        self.products: dict[str, LinearProducts | None] = {
            name: make(training, model.device)
            for name, make in find_members("linear_products").items()
        }
        self._products = next((one for one in self.products.values() if one), None)
        self._hidden_states: Callable[..., Tensor] = model.hidden_states
        if self.compiles:
            # a process that trains many models would reach the limit on recompilations
            torch.compiler.reset()
            remove_torn_libraries()
            self._hidden_states = torch.compile(model.hidden_states)

    def forward(
        self, x: Tensor, y: Tensor, eager: bool = False, reads: KVReads | None = None
    ) -> Tensor:
        """Return the sum over all targets in nats.

        Args:
            eager: do not use the compiled model, which another shape would compile again.
            reads: whose K/V the layers read; by default their owners'.
        """
        hidden = self.hidden_states(x, eager, reads)
        if self.target_ids is not None:
            is_target = find_targets(y, self.target_ids)
            hidden, y = hidden[is_target], y[is_target]
        with self._autocast():
            return summed_loss(hidden, self.model.lm_head.weight, y, compile=self.compiles)

    def hidden_states(self, x: Tensor, eager: bool = False, reads: KVReads | None = None) -> Tensor:
        """Return the residual stream (B, T, E) of tokens (B, T), in the training's precision."""
        hidden_states = self.model.hidden_states if eager else self._hidden_states
        if reads is not None and self.compiles and not eager:
            reads = reads.for_compiler(x.device)
        self.model.prepare_positions(x.shape[1])  # outside of the compiled graph
        with self._autocast(), self.model.multiply_by(self._products):
            return hidden_states(
                x,
                document_start=self.document_start,
                residual_dtype=self.residual_dtype,
                reads=reads,
            )

    def count_targets(self, y: Tensor) -> int:
        """Return how many of the tokens are targets that count."""
        return y.numel() if self.target_ids is None else int(find_targets(y, self.target_ids).sum())

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.uses_autocast)


@dataclass(frozen=True)
class WorkerGroup:
    """This process as worker ``rank`` of ``size``. A single worker needs no process group.

    Every worker holds the whole model and takes its share of each step's rows; gradients are
    averaged by PyTorch's DistributedDataParallel. A step has the same rows as with one worker, so
    the losses are equal up to the order of summation.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls, size: int) -> "WorkerGroup":
        """Return this process's position in the process group.

        Raises:
            ResourceError: the group does not have ``size`` workers.
        """
        has_group = dist.is_available() and dist.is_initialized()
        group = cls(dist.get_rank(), dist.get_world_size()) if has_group else cls()
        if group.size != size:
            text = f"the training is for {size} workers and runs in {group.size}"
            raise ResourceError(f"{text}; use the Ray executor, or resources.workers: {group.size}")
        return group

    @property
    def is_rank_zero(self) -> bool:
        """Whether this worker writes files and reports."""
        return self.rank == 0

    def row_slice(self, count: int) -> slice:
        """Return this worker's part of ``count`` rows, a multiple of ``size``."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """Sum ``value`` over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def broadcast_decision(self, decide: Callable[[], bool], device: torch.device) -> bool:
        """Return what ``decide`` returns on rank zero; the others do not call it."""
        if self.size == 1:
            return decide()
        decision = torch.tensor([self.is_rank_zero and decide()], dtype=torch.int32, device=device)
        dist.broadcast(decision, 0)
        return bool(decision.item())


class TrainStepper:
    """Takes the steps of one training on this worker; ``model`` is trained in place.

    Attributes:
        attention: the attention kernels that run; None before the first step.

    Raises:
        ResourceError: the process group has another size than the experiment asks for.
    """

    def __init__(self, model: GPT, dataset: TokenSplits, experiment: Experiment, seed: int):
        self.model, self.dataset, self.seed = model, dataset, seed
        self.training, self.block_size = experiment.training, experiment.model.block_size
        self.device = model.device
        model.trained_kv = self.training.kv
        self.workers = WorkerGroup.current(experiment.resources.training_workers)
        self.rows = self.training.batch_tokens // self.block_size
        self.microbatch_rows = device_microbatch_rows(experiment, self.device)
        self._draw_reads = find_members("step_reads").values()
        self.optimizer: Optimizer = resolve_name(OPTIMIZERS[self.training.optimizer].make)(
            model, self.training
        )
        data = experiment.data
        self.parts = data.parts
        self.loss = SummedLoss(model, self.training, data.document_start, data.target_ids)
        self.wrapped_loss: nn.Module = self.loss
        self.attention: set[str] | None = None
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[Batch]] | None = None

    def connect_workers(self) -> None:
        """Average gradients over the workers. All start from the weights of rank zero."""
        if self.workers.size > 1:
            if self.loss.compiles:  # else the graph is cut at each bucket of gradients
                torch._dynamo.config.optimize_ddp = False
            ids = [self.device] if self.device.type == "cuda" else None
            self.wrapped_loss = DistributedDataParallel(self.loss, device_ids=ids)

    def step(self, step: int) -> float:
        """Take the optimizer step ``step`` and return its mean loss.

        Raises:
            Diverged: loss or gradient are not finite; the weights are unchanged.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.training, step)
        self.optimizer.zero_grad()
        loss = self.accumulate_gradient(step)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        loss_value, norm_value = torch.stack([loss, norm]).tolist()  # one synchronization
        check_finite("loss", loss_value, self.training, step)
        check_finite("gradient's norm", norm_value, self.training, step)
        self.optimizer.step()
        return float(loss_value)

    def accumulate_gradient(self, step: int) -> Tensor:
        """Add up the gradient of the mean loss over the step's targets; return that loss."""
        x, y = (part.to(self.device, non_blocking=True) for part in self._take_batch(step))
        targets = self._mean_targets(y)
        if self.attention is None and self.loss.compiles:
            # A compiled pass notes no kernels: find them by one that is not compiled. On CPU it
            # has none of the kernels that are chosen by size.
            as_compiled = use_plain_code() if self.device.type == "cpu" else nullcontext()
            with as_compiled, record_kernels() as self.attention:
                self.loss.hidden_states(x[:1], eager=True)
        total = torch.zeros((), device=self.device)
        drawn = (d(self.training, self.model.config, self.seed, step) for d in self._draw_reads)
        reads = next((one for one in drawn if one is not None), None)
        for start in range(0, len(x), self.microbatch_rows):
            rows = slice(start, start + self.microbatch_rows)
            is_last = start + self.microbatch_rows >= len(x)
            noting = record_kernels() if self.attention is None else nullcontext(self.attention)
            # gradients are exchanged once, with a step's last microbatch
            exchange: AbstractContextManager[Any] = nullcontext()
            if isinstance(self.wrapped_loss, DistributedDataParallel) and not is_last:
                exchange = self.wrapped_loss.no_sync()
            with exchange, noting as kernels:
                # gradients are averaged over the workers, so each divides by the mean of targets
                loss = self.wrapped_loss(x[rows], y[rows], reads=reads) / targets
                loss.backward()
            self.attention = kernels
            total += loss.detach()
        return self.workers.all_reduce_sum(total) / self.workers.size

    def _mean_targets(self, y: Tensor) -> float:
        """Return the number of targets of a step, as a mean over the workers."""
        count = self.loss.count_targets(y)
        if self.loss.target_ids is None or self.workers.size == 1:
            return max(1, count)
        total = self.workers.all_reduce_sum(torch.tensor(count, device=self.device))
        return max(1, int(total)) / self.workers.size

    def _take_batch(self, step: int) -> Batch:
        """Return this worker's batch (R, T) of a step, which may have been read already."""
        known, self._ahead = self._ahead, None
        batch = known[1].result() if known and known[0] == step else self._read_batch(step)
        if self.device.type in READ_AHEAD_DEVICES and step + 1 < self.training.steps:
            self._ahead = step + 1, self._reader.submit(self._read_batch, step + 1)
        return batch

    def _read_batch(self, step: int) -> Batch:
        x, y = (
            torch.from_numpy(part)
            for part in get_training_batch(
                self.dataset.train,
                seed=self.seed,
                step=step,
                batch_size=self.rows,
                block_size=self.block_size,
                rows=self.workers.row_slice(self.rows),
                parts=self.parts,
            )
        )
        # a copy from pinned memory does not wait for the device
        return (x.pin_memory(), y.pin_memory()) if self.device.type == "cuda" else (x, y)

    def describe_products(self) -> dict[str, Any]:
        """Return what `TrainingRecord.products` says."""
        layers = len(self.model.linear_layers())
        return {name: one and one.describe(layers) for name, one in self.loss.products.items()}

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return nats per target over ``evaluate_tokens``, in the training's precision."""
        count, validation = self.training.evaluate_tokens, self.dataset.validation
        text = spread_windows(validation, count, self.block_size, self.parts)
        total, targets = 0.0, 0.0
        for number, batch in enumerate(text.iter_batches(self.microbatch_rows)):
            if number % self.workers.size == self.workers.rank:
                x, y = (torch.from_numpy(part).to(self.device) for part in batch)
                total += float(self.loss(x, y, eager=len(x) != self.microbatch_rows))
                targets += self.loss.count_targets(y)
        if self.workers.size > 1:
            sums = torch.tensor([total, targets], dtype=torch.float64, device=self.device)
            total, targets = self.workers.all_reduce_sum(sums).tolist()
        return total / max(1, targets)


def device_microbatch_rows(experiment: Experiment, device: torch.device) -> int:
    """Return the rows of ``block_size`` tokens in one forward pass on ``device``.

    They divide a worker's rows of a step. The size does not change the mathematics, only the
    memory. It depends on the experiment and the kind of device alone, so that a resumed run sums
    in the same order.
    """
    is_cuda = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if is_cuda else None
    return microbatch_rows(experiment, memory)


def check_finite(name: str, value: float, training: TrainingConfig, step: int) -> None:
    """Check that a value is neither NaN nor infinite.

    Raises:
        Diverged: it is.
    """
    if not math.isfinite(value):
        raise Diverged(_divergence_message(f"the {name} is {value}", training, step))


def check_spike(
    losses: Sequence[float], lowest: float | None, training: TrainingConfig, step: int
) -> float | None:
    """Check the mean loss of the last `WINDOW` steps against the lowest such mean so far.

    Args:
        losses: of all steps so far.
        lowest: the return value for the step before.

    Returns:
        The lowest mean including this step; None before there are `WINDOW` losses.

    Raises:
        Diverged: the mean is ``training.spike`` nats above the lowest.
    """
    if len(losses) < WINDOW:
        return lowest
    mean = math.fsum(losses[-WINDOW:]) / WINDOW
    if lowest is None or mean < lowest:
        return mean
    if training.spike is not None and mean > lowest + training.spike:
        rise = f"from {lowest:.3f} to {mean:.3f}, over training.spike = {training.spike:g},"
        text = f"the mean loss of {WINDOW} steps rose {rise}"
        raise Diverged(_divergence_message(text, training, step))
    return lowest


def _divergence_message(text: str, training: TrainingConfig, step: int) -> str:
    where = f"at step {step} of {training.steps}"
    rate = f"with learning_rate = {training.learning_rate:g}"
    return f"{text} {where}, {rate}; lower it, or lengthen warmup_tokens"


FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices on which torch updates all of a parameter's state in one pass over memory."""


def make_optimizer(model: GPT, training: TrainingConfig) -> AdamW:
    """Return AdamW for all parameters."""
    return make_adamw([*model.parameters()], training)


def make_adamw(parameters: Sequence[nn.Parameter], training: TrainingConfig) -> AdamW:
    """Return AdamW (arXiv 1711.05101) with weight decay on matrices, not on biases and norms."""
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    return AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.adam_eps,
        fused=parameters[0].device.type in FUSED_DEVICES,
    )


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the learning rate of the optimizer step ``step``, a pure function of it.

    Linear warm-up over ``warmup_tokens``, rounded up to whole steps: step 0 gets one part of it,
    the last warm-up step all of ``learning_rate``. Then ``training.schedule``, which would reach
    ``final_learning_rate`` at step ``training.steps``, one after the last.

    Args:
        step: from 0 to ``training.steps - 1``.
    """
    peak, final = training.learning_rate, training.final_learning_rate
    assert final is not None, "filled in by the spec"
    warmup = training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if training.schedule == "wsd":
        # Warm-up, stable, decay: the peak until ``decay_tokens`` before the end, then 1 - sqrt.
        # Hägele et al. (arXiv 2405.18392) find that shape better than a straight line.
        start = training.steps - training.decay_steps
        decayed = max(0, step - start) / max(1, training.decay_steps)
        share = 1 - math.sqrt(decayed)
    else:  # half a cosine after the warm-up
        progress = (step - warmup) / (training.steps - warmup)
        share = 0.5 * (1 + math.cos(math.pi * progress))
    return share * peak + (1 - share) * final
