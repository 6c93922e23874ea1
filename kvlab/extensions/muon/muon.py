"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for hidden matrices."""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kvlab.model import GPT
from kvlab.spec.training_config import TrainingConfig
from kvlab.train.train_step import make_adamw

MOMENTUM, ITERATIONS, COEFFICIENTS = 0.95, 5, (3.4445, -4.7750, 2.0315)
"""Those of the post."""


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return roughly U V^T of the singular value decomposition, by Newton-Schulz iterations.

    They are in bfloat16 on CUDA, as in `torch.optim.Muon`. On CPU they are in the matrix's own
    dtype: bfloat16 took several times as long there.
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp_min(1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


class Muon(Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    A step is 0.2 sqrt(max(rows, columns)) times the rate, so that it is as large as one of AdamW
    and needs no rate and no weight decay of its own (arXiv 2502.16982, section 2.2).
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed before"
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - MOMENTUM)
                update = orthogonalize(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


class JointOptimizer(Optimizer):
    """Several optimizers, each of its own parameters, as one.

    Groups and state are those of the parts, so that rates and checkpoints reach all of them.
    """

    def __init__(self, *parts: Optimizer):
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        self.state: defaultdict[Any, Any] = defaultdict(dict)
        for part in parts:
            part.state = self.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are computed before"
        for part in self.parts:
            part.step()


def make_muon(model: GPT, training: TrainingConfig) -> Optimizer:
    """Return Muon for the matrices of attention and MLPs, and AdamW for all other parameters."""
    matrices = [layer.weight for layer in model.linear_layers().values()]
    own = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    muon = Muon(matrices, training.learning_rate, training.weight_decay)
    return JointOptimizer(muon, make_adamw(others, training))
