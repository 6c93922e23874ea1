"""Measure how fast this machine trains a model: ``python -m kvlab.trial.speed_test``.

A plan starts it in a process of its own, because it needs torch; see
`kvlab.sweep.planning.budget`.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch

from kvlab.benchmark.interleaving import NoiseWatch
from kvlab.layout import training_flops
from kvlab.model import GPT
from kvlab.spec.experiment import Experiment
from kvlab.spec.extension_files import trust
from kvlab.train.train_step import TrainStepper
from kvlab.trial.smoke_test import RandomTokens

STEPS, SECONDS = 3, 1.0
"""The fewest measured steps, after one that warms up, and how long they last together."""

WATCH_SECONDS = 0.3
"""For which it is seen whether other processes use this machine."""


def measure_training_rate(experiment: Experiment, threads: int) -> dict[str, Any]:
    """Return ``flops_per_second`` of a training, and whether it ``is_scaled`` from one thread.

    Where other processes use the machine, threads that wait for each other say nothing about it
    alone. Then the processor time of one thread is measured, which waits for nobody, and the rate
    is multiplied by the number of threads.
    """
    watch = NoiseWatch()
    time.sleep(WATCH_SECONDS)
    is_scaled = threads > 1 and bool(watch.read_noise())
    torch.set_num_threads(1 if is_scaled else threads)
    clock = time.perf_counter if threads > 1 and not is_scaled else time.thread_time
    rate = _measure_rate(experiment, clock) * (threads if is_scaled else 1)
    return {"flops_per_second": rate, "is_scaled": is_scaled}


def _measure_rate(experiment: Experiment, clock: Callable[[], float]) -> float:
    """Return the FLOPs per second of the median step."""
    tokens = np.random.default_rng(0).integers(experiment.model.vocab_size, size=20_000)
    model = GPT(experiment.model, seed=0)
    stepper = TrainStepper(model, RandomTokens(tokens, tokens), experiment, seed=0)
    stepper.connect_workers()
    seconds = list[float]()
    while len(seconds) <= STEPS or sum(seconds) < SECONDS:
        start = clock()
        stepper.step(len(seconds))
        seconds.append(clock() - start)
    return training_flops(experiment) / experiment.training.steps / median(seconds[1:])


if __name__ == "__main__":  # read {"experiment": ..., "threads": ...} and print the rate, as JSON
    asked = json.load(sys.stdin)
    trust(*asked["experiment"].get("extensions", {}).values())
    experiment = Experiment.model_validate_json(json.dumps(asked["experiment"]))
    print(json.dumps(measure_training_rate(experiment, asked["threads"])))
