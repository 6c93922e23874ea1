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

from kvlab.benchmark.benchmark_stage import BenchmarkResult, benchmark
from kvlab.benchmark.device_peaks import processor_name
from kvlab.data import dataset_identity, iter_validation_batches, prepare_dataset
from kvlab.errors import DataError, ResourceError
from kvlab.evaluate import evaluate
from kvlab.evaluate.evaluation import position_loss_windows
from kvlab.evaluate.validation_loss import Tokens
from kvlab.fs.lease import Fence
from kvlab.layout.gpu_sharing import allocator_share
from kvlab.model import GPT
from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.store.progress import ProgressUpdate
from kvlab.store.provenance import DataProvenance, Machine
from kvlab.store.result import TrialMeasurements
from kvlab.train import load_final_weights, load_training_record, train
from kvlab.trial.ddp import train_ddp
from kvlab.trial.gpu_timing_lock import TimingLock
from kvlab.trial.initial_weights_loader import InitialWeightsLoader, read_initialization_record
from kvlab.trial.trial import Trial

BENCHMARK_TEXT_TOKENS = 100_000
"""Tokens of the training text that the benchmark's task takes its prompts from."""


class TorchStages:
    """The stages of one trial on this machine.

    Raises:
        ResourceError: the trial wants a GPU and there is none.
        DataError: the text here is not the text that was planned, or too little of it is held
            out for what is measured.
    """

    def __init__(self, trial: Trial, report: Callable[[ProgressUpdate], None]):
        self._trial, self._report = trial, report
        self._experiment = trial.experiment
        self._device, self._machine = set_up_device(trial.resources, trial.seed)
        self._turns = _open_timing_lock(trial)
        if self._turns is not None:
            self._turns.enter(lambda: report({"stage": "waiting", "note": "somebody times"}))
        report({"stage": "data"})
        self._dataset = prepare_dataset(
            self._experiment.data, lambda note: report({"stage": "data", "note": note})
        )
        found = dataset_identity(self._experiment.data)
        if found != trial.data_identity:
            text = f"the text of data.source = {self._experiment.data.source} is not what was"
            raise DataError(f"{text} planned ({found[:12]}, not {trial.data_identity[:12]})")
        check_validation_tokens(self._dataset.validation, self._experiment)

    def train(self, directory: Path, should_stop: Callable[[], bool], fence: Fence) -> None:
        if self._experiment.resources.training_workers > 1:
            train_ddp(self._trial, directory, self._report, should_stop, fence)
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
            initial_weights=self._weight_loader(directory, fence),
            until=self._trial.until,
            fence=fence,
        )

    def _between_steps(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """``should_stop``, before which others get their turn on a shared device."""
        turns = self._turns
        if turns is None:
            return should_stop
        return lambda: (turns.give_way(), should_stop())[1]

    def _evaluating(self, state: ProgressUpdate) -> None:
        self._report(state)
        if self._turns is not None:
            self._turns.give_way(lambda: self._report(state))

    def _weight_loader(self, directory: Path, fence: Fence) -> InitialWeightsLoader | None:
        weights = self._trial.initial_weights
        if weights is None:
            return None
        return InitialWeightsLoader(weights, directory, self._report, fence)

    def measure(self, directory: Path) -> TrialMeasurements:
        training = load_training_record(directory)
        assert training is not None, "measured only after training"
        model = self._model()
        load_final_weights(model, directory)
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
        record: dict[str, Any] = {
            **asdict(training),
            "start": read_initialization_record(directory),
        }
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
        return TrialMeasurements(
            measurements, curves, record, machine, data, evaluation.items, lines
        )

    def _benchmark(self, model: GPT) -> tuple[BenchmarkResult, Machine]:
        """Speed, with the device alone where others share it; and whether that was so."""

        def waiting() -> None:
            self._report({"stage": "benchmark", "note": "waits for the device alone"})

        with nullcontext(True) if self._turns is None else self._turns.alone(waiting) as alone:
            speed = benchmark(
                model,
                self._experiment,
                device=self._device,
                on_progress=self._report,
                tokens=self._dataset.train[:BENCHMARK_TEXT_TOKENS].tolist(),
            )
        exclusive = alone and not speed.disturbed
        return speed, replace(self._machine, timings="exclusive" if exclusive else "shared")

    def _model(self) -> GPT:
        return GPT(self._experiment.model, seed=self._trial.seed).to(self._device)


def _open_timing_lock(trial: Trial) -> TimingLock | None:
    """On a device that other trials share."""
    if not trial.experiment.resources.shares:
        return None
    return _turns_on(str(torch.cuda.get_device_properties(0).uuid))


@cache
def _turns_on(device: str) -> TimingLock:
    """One for the process: a trial that ended by an error still holds what it held."""
    return TimingLock(device, settle=torch.cuda.synchronize)


def set_up_device(resources: ResourcesConfig, seed: int) -> tuple[str, Machine]:
    """Set the seeds, threads and device memory of this process.

    Returns:
        The device's torch name and what the record says of the machine.

    Raises:
        ResourceError: a GPU is required and none is visible.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    threads = max(1, int(resources.cpus))
    torch.set_num_threads(threads)
    if resources.devices == 0:
        return "cpu", Machine(processor_name(), threads)
    if not torch.cuda.is_available():
        text = f"resources.gpus = {resources.devices:g}, and no CUDA device is visible here"
        raise ResourceError(f"{text}; set it to 0 or run where there is one")
    if resources.shares:  # Ray only schedules fractions, it does not enforce them
        memory = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(allocator_share(resources.devices, memory))
    return "cuda", Machine(torch.cuda.get_device_name(), threads)


# Whether the held-out text suffices for what a trial asks of it: known before it trains.


def check_validation_tokens(tokens: Tokens, experiment: Experiment) -> None:
    """Refuses what training or evaluation would, at its end, find too short.

    Args:
        tokens: held-out ids, (tokens,).

    Raises:
        DataError: there are too few.
    """
    evaluation, block = experiment.evaluation, experiment.model.block_size
    wanted = [(evaluation.loss_tokens, block)]
    if evaluation.served and evaluation.served_tokens:
        wanted.append((evaluation.served_tokens, block))
    if evaluation.positions:
        wanted.append(position_loss_windows(experiment))
    if experiment.training.steps:
        wanted.append((experiment.training.evaluate_tokens, block))
    for count, length in wanted:  # refuses at once, reads nothing yet
        iter_validation_batches(tokens, tokens_wanted=count, block_size=length, batch_size=1)
