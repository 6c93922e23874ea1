"""Measure how fast this machine trains: ``python -m kvlab.trial.speed_test THREADS`` prints it.

A plan starts it in a process of its own, because it needs torch; see
`kvlab.sweep.planning.machine_speed`.
"""

import json
import sys
import time

import numpy as np
import torch

from kvlab.layout import training_flops
from kvlab.model import GPT
from kvlab.spec.experiment import Experiment
from kvlab.train.train_step import TrainStepper

WIDTHS = (64, 256, 768)
"""Of the models that are trained. Narrow ones reach fewer FLOPs per second."""

STEPS = 4
"""Of each model; the first warms up. The processor time of a thread counts, as other processes may
want the same cores."""


class _RandomTokens:
    """Random token ids in place of a dataset."""

    def __init__(self, vocab_size: int):
        self.train = np.random.default_rng(0).integers(vocab_size, size=5000)
        self.validation = self.train


def measure_training_rates(widths: tuple[int, ...] = WIDTHS) -> dict[int, float]:
    """Return the FLOPs per second of the fastest training step at each width."""
    return {width: _measure_rate(_make_experiment(width)) for width in widths}


def _measure_rate(experiment: Experiment) -> float:
    tokens = _RandomTokens(experiment.model.vocab_size)
    stepper = TrainStepper(GPT(experiment.model, seed=0), tokens, experiment, seed=0)
    stepper.connect_workers()
    seconds = []
    for step in range(STEPS):
        start = time.thread_time()
        stepper.step(step)
        seconds.append(time.thread_time() - start)
    return training_flops(experiment) / experiment.training.steps / min(seconds[1:])


def _make_experiment(width: int) -> Experiment:
    return Experiment.model_validate(
        {
            "name": "speed",
            "model": {
                "vocab_size": 257, "block_size": 128, "n_layer": 2, "n_head": width // 16,
                "n_embd": width,
            },
            "data": {"tokenizer": "bytes"},
            "training": {"tokens": 512 * STEPS, "batch_tokens": 512, "evaluate_tokens": 128},
            "benchmark": {"prompt_tokens": 4, "new_tokens": 4},
        }
    )  # fmt: skip


def main() -> int:
    """Print the rates with the given number of threads as JSON."""
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(measure_training_rates()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
