"""How fast this machine trains a model, measured once and remembered in the user's cache folder.

A plan needs it before the first trial has ended; later the results of trials say more. What is
trained is a model of few layers and otherwise the shape of the one that is planned, in its
precision: the rate depends on these more than on anything else.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from kvlab.data.data_dir import get_data_dir
from kvlab.errors import StoreError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.spec.experiment import Experiment
from kvlab.trial.fingerprint import ID_LENGTH, fingerprint

UNCERTAINTY = 2.0
"""Trainings take between a half and twice the time that the rates here give."""

LAYERS = 2
"""Most layers of the model that is trained."""

STEP_TOKENS = 1024
"""Of a step at most, if a block is not longer."""

_SHAPE = (
    "vocab_size", "block_size", "n_head", "n_embd", "mlp", "ffn_dim", "position", "norm", "bias",
    "tie_embeddings",
)  # fmt: skip
_MODULE = "kvlab.trial.speed_test"
_TIMEOUT_SECONDS = 120.0


def load_training_rate(
    experiment: Experiment, threads: int, *, on_measure: Callable[[], None] | None
) -> tuple[float, bool] | None:
    """Return the FLOPs per second of a training like that of an experiment on CPU.

    Args:
        threads: Of one training.
        on_measure: Called before it is measured, in a process with torch, if it is not remembered;
            that takes some seconds. None does not measure it.

    Returns:
        The rate, and whether it is that of one thread times their number, as the machine was busy.
        None if it is not known and cannot be measured.
    """
    facts = make_short_training(experiment)
    name = f"{platform.node()}-{os.cpu_count()}-torch-{importlib.metadata.version('torch')}"
    safe = "".join(c if c.isalnum() or c in "-." else "_" for c in name)  # one cache, many machines
    path = get_data_dir() / "training-rates" / f"{safe}.json"
    key = fingerprint({"training": facts, "threads": threads})[:ID_LENGTH]
    try:
        remembered: dict[str, Any] = dict(read_json(path))
    except (FileNotFoundError, StoreError, ValueError, TypeError):
        remembered = {}  # not measured yet, or the file is damaged
    with contextlib.suppress(KeyError, TypeError):
        return remembered[key]["flops_per_second"], remembered[key]["is_scaled"]
    if on_measure is None:
        return None
    on_measure()
    measured = _measure(facts, threads)
    if measured is None:
        return None
    with contextlib.suppress(StoreError):  # not writable: the next plan measures again
        write_json(path, {**remembered, key: measured})
    return measured["flops_per_second"], measured["is_scaled"]


def make_short_training(experiment: Experiment) -> dict[str, Any]:
    """Return, as plain data, an experiment of few layers and short steps for the measurement."""
    model = experiment.model.model_dump(mode="json")
    training = experiment.training.model_dump(mode="json")
    block = model["block_size"]
    tokens = max(block, STEP_TOKENS // block * block)
    return {
        "name": "speed",
        "model": {**{key: model[key] for key in _SHAPE}, "n_layer": min(model["n_layer"], LAYERS)},
        "data": {"tokenizer": "bytes"},
        "training": {
            "tokens": 8 * tokens, "batch_tokens": tokens, "evaluate_tokens": block,
            "precision": training["precision"],
            **({"int8": training["int8"]} if training["int8"] else {}),
        },
        "benchmark": {"prompt_tokens": 1, "new_tokens": 1},
    }  # fmt: skip


def _measure(facts: dict[str, Any], threads: int) -> dict[str, Any] | None:
    """Return what `kvlab.trial.speed_test.measure_training_rate` does, in another process."""
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-m", _MODULE],  # not what the working folder has
            input=json.dumps({"experiment": facts, "threads": threads}).encode(),
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            check=True,
        )
        measured: dict[str, Any] = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return measured
