"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for hidden matrices."""

from collections import defaultdict
from typing import Any

from torch.optim import Muon, Optimizer

from kvlab.model import GPT
from kvlab.spec.training_config import TrainingConfig
from kvlab.train.train_step import make_adamw


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
    """Return Muon for the matrices of attention and MLPs, and AdamW for all other parameters.

    A step of Muon is 0.2 sqrt(max(rows, columns)) times the rate, so that it is as large as one of
    AdamW and needs no rate and no weight decay of its own (arXiv 2502.16982, section 2.2).
    """
    matrices = [layer.weight for layer in model.linear_layers().values()]
    own = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in own]
    muon = Muon(
        matrices,
        lr=training.learning_rate,
        weight_decay=training.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return JointOptimizer(muon, make_adamw(others, training))
