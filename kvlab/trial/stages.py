"""Training and measurement of one trial: kvlab's parts put together. Imports torch."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvlab.benchmark.measure import Benchmarked, benchmark
from kvlab.benchmark.processor import processor_name
from kvlab.data import identity, prepare
from kvlab.errors import DataError, ResourceError
from kvlab.evaluate import evaluate
from kvlab.layout.packing import allocator_share
from kvlab.model import GPT
from kvlab.train import load_training, load_weights, train
from kvlab.trial.beginning import Beginning, read_beginning
from kvlab.trial.held_out import check_held_out
from kvlab.trial.progress import Update
from kvlab.trial.provenance import DataProvenance, Machine
from kvlab.trial.result import Measured
from kvlab.trial.together import train_together
from kvlab.trial.trial import Trial
from kvlab.trial.turns import Turns

TASK_TEXT = 100_000
"""Tokens of the training text that the benchmark's task takes its prompts from."""


class TorchStages:
    """The stages of one trial on this machine.

    Raises:
        ResourceError: the trial wants a GPU and there is none.
        DataError: the text here is not the text that was planned, or too little of it is held
            out for what is measured.
    """

    def __init__(self, trial: Trial, report: Callable[[Update], None]):
        self._trial, self._report = trial, report
        self._experiment = trial.experiment
        self._device, self._machine = set_up(trial)
        self._turns = _turns(trial)
        if self._turns is not None:
            self._turns.enter(lambda: report({"stage": "waiting", "note": "somebody times"}))
        report({"stage": "data"})
        self._dataset = prepare(
            self._experiment.data, lambda note: report({"stage": "data", "note": note})
        )
        found = identity(self._experiment.data)
        if found != trial.data_identity:
            text = f"the text of data.source = {self._experiment.data.source} is not what was"
            raise DataError(f"{text} planned ({found[:12]}, not {trial.data_identity[:12]})")
        check_held_out(self._dataset.validation, self._experiment)

    def train(self, directory: Path, should_stop: Callable[[], bool]) -> None:
        if self._experiment.resources.training_workers > 1:
            train_together(self._trial, directory, self._report, should_stop)
            return
        train(
            self._model(),
            self._dataset,
            self._experiment,
            seed=self._trial.seed,
            directory=directory,
            device=self._device,
            on_progress=self._report,
            should_stop=self._between_steps(should_stop),
            beginning=self._beginning(directory),
            until=self._trial.until,
        )

    def _between_steps(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """``should_stop``, before which others get their turn on a shared device."""
        turns = self._turns
        if turns is None:
            return should_stop
        return lambda: (turns.give_way(), should_stop())[1]

    def _evaluating(self, state: Update) -> None:
        self._report(state)
        if self._turns is not None:
            self._turns.give_way(lambda: self._report(state))

    def _beginning(self, directory: Path) -> Beginning | None:
        start = self._trial.start
        return None if start is None else Beginning(start, directory, self._report)

    def measure(self, directory: Path) -> Measured:
        training = load_training(directory)
        assert training is not None, "measured only after training"
        model = self._model()
        load_weights(model, directory)
        model.eval()
        evaluation = evaluate(
            model,
            self._dataset,
            self._experiment,
            device=self._device,
            on_progress=self._evaluating,
        )
        speed, machine = self._benchmark(model)
        measurements = {**evaluation.measurements, **speed.measurements}
        record: dict[str, Any] = {**asdict(training), "start": read_beginning(directory)}
        if record["steps"]:
            rates = ("tokens_per_second", "flops_per_second", "mfu")
            # beside other trials on the device, a rate of training is not a speed
            for name in ("peak_bytes", *(() if self._turns else rates)):
                measurements[f"training_{name}"] = record[name]
        curves = {
            "train_loss": record.pop("train_curve"),
            "validation_loss": record.pop("validation_curve"),
        }
        data = DataProvenance(
            identity=self._trial.data_identity,
            digest=self._dataset.digest,
            licence=self._dataset.licence,
            tokenizer=self._dataset.tokenizer,
        )
        lines = [line.model_dump(mode="json", exclude_defaults=True) for line in speed.lines]
        return Measured(measurements, curves, record, machine, data, evaluation.items, lines)

    def _benchmark(self, model: GPT) -> tuple[Benchmarked, Machine]:
        """Speed, with the device alone where others share it; and whether that was so."""

        def waiting() -> None:
            self._report({"stage": "benchmark", "note": "waits for the device alone"})

        with nullcontext(True) if self._turns is None else self._turns.alone(waiting) as alone:
            speed = benchmark(
                model,
                self._experiment,
                device=self._device,
                on_progress=self._report,
                tokens=self._dataset.train[:TASK_TEXT].tolist(),
            )
        exclusive = alone and not speed.disturbed
        return speed, replace(self._machine, timings="exclusive" if exclusive else "shared")

    def _model(self) -> GPT:
        return GPT(self._experiment.model, seed=self._trial.seed).to(self._device)


def _turns(trial: Trial) -> Turns | None:
    """On a device that other trials share."""
    if not trial.experiment.resources.shares:
        return None
    return _turns_on(str(torch.cuda.get_device_properties(0).uuid))


@cache
def _turns_on(device: str) -> Turns:
    """One for the process: a trial that ended by an error still holds what it held."""
    return Turns(device, settle=torch.cuda.synchronize)


def set_up(trial: Trial) -> tuple[str, Machine]:
    """Seeds, threads and device of this process, from the trial's resources."""
    resources = trial.experiment.resources
    random.seed(trial.seed)
    np.random.seed(trial.seed)
    torch.manual_seed(trial.seed)
    threads = max(1, int(resources.cpus))
    torch.set_num_threads(threads)
    if resources.devices == 0:
        return "cpu", Machine(processor_name(), threads)
    if not torch.cuda.is_available():
        text = f"resources.gpus = {resources.devices:g}, and no CUDA device is visible here"
        raise ResourceError(f"{text}; set it to 0 or run where there is one")
    if resources.shares:  # fractions schedule, they do not limit by themselves
        memory = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(allocator_share(resources.devices, memory))
    return "cuda", Machine(torch.cuda.get_device_name(), threads)
