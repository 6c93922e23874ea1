"""AdamW and the learning-rate schedule, as published reproductions of GPT-2 use them, and weights
that are kept in int8."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.optim import AdamW

from kvlab.model import GPT
from kvlab.model.kernels import Linear, quantize_weight
from kvlab.spec import TrainingConfig

FUSED_DEVICES = frozenset({"cpu", "cuda"})
"""Devices on which torch updates all of a parameter's state in one pass over memory."""


def make_optimizer(model: GPT, training: TrainingConfig) -> AdamW:
    """Return AdamW (arXiv 1711.05101) with weight decay on matrices, not on biases and norms."""
    matrices, others = model.decay_groups()
    return AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        eps=training.adam_eps,
        fused=model.device.type in FUSED_DEVICES,
    )


class Int8Weights:
    """The weights of linear layers in int8 between the optimizer's steps, with no other copy.

    Quantized training as in torchao: a step decodes the weights, changes them in float32, and
    rounds them again. In between a parameter has a shape and a gradient, but no values; its layer
    has the codes. The random numbers are a function of seed and step, so that workers agree and a
    resumed training draws the same.

    Args:
        layers: whose weights are kept so.
        rounding: `TrainingConfig.int8_weights`, not ``none``.
    """

    def __init__(self, layers: Sequence[Linear], rounding: str, seed: int):
        self._layers, self._rounding, self._seed = layers, rounding, seed

    def encode(self, step: int | None = None) -> None:
        """Replace the values of the weights by codes.

        Args:
            step: just taken, for stochastic rounding. Without it the nearest codes are taken, which
                for values that were codes before are the same.
        """
        generator = None
        if step is not None and self._rounding == "stochastic":
            digest = hashlib.sha256(f"{self._seed}:{step}:int8_weights".encode()).digest()
            generator = torch.Generator(self._layers[0].weight.device)
            generator.manual_seed(int.from_bytes(digest[:8], "little") % 2**63)
        for layer in self._layers:
            layer.codes = quantize_weight(layer.weight.data, generator)
            _drop_values(layer)

    def decode(self) -> None:
        """Give the parameters their values back."""
        for layer in self._layers:
            if layer.codes is not None:
                layer.weight.data = layer.codes.decode()
                layer.codes = None

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Give the parameters their values inside the block, which must not change them."""
        for layer in self._layers:
            assert layer.codes is not None, "encoded before"
            layer.weight.data = layer.codes.decode()
        try:
            yield
        finally:
            for layer in self._layers:
                _drop_values(layer)


def _drop_values(layer: Linear) -> None:
    weight = layer.weight
    weight.data = weight.data.new_zeros(()).expand(weight.shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of the next step for every parameter."""
    for group in optimizer.param_groups:
        group["lr"] = rate


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
    share = _SCHEDULES[training.schedule](training, step)
    return share * peak + (1 - share) * final


def _cosine_share(training: TrainingConfig, step: int) -> float:
    """Half a cosine after the warm-up."""
    warmup = training.warmup_steps
    progress = (step - warmup) / max(1, training.steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _wsd_share(training: TrainingConfig, step: int) -> float:
    """Warm-up, stable, decay: the peak until ``decay_tokens`` before the end, then 1 - sqrt.

    Hägele et al. (arXiv 2405.18392) find that shape better than a straight line.
    """
    decay = training.decay_steps
    start = training.steps - decay
    return 1.0 if step < start else 1 - math.sqrt((step - start) / max(1, decay))


_SCHEDULES: dict[str, Callable[[TrainingConfig, int], float]] = {
    "cosine": _cosine_share,
    "wsd": _wsd_share,
}
