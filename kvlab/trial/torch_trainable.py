"""Train and measure one trial with torch, see `kvlab.trial.run.Trainable`."""

import os
import random
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from kvlab.benchmark.benchmark_stage import BenchmarkResult, benchmark
from kvlab.benchmark.device_peaks import processor_name
from kvlab.data.bigram_table import score_tables
from kvlab.data.data_dir import get_data_dir
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.errors import DataError, RecordDamaged, ResourceError
from kvlab.evaluate import evaluate
from kvlab.evaluate.evaluation import select_held_out, select_scored_text
from kvlab.fs.lease import Fence
from kvlab.layout.gpu_sharing import allocator_share, start_mps
from kvlab.model import GPT
from kvlab.spec import ResourcesConfig
from kvlab.store.attempt import ProgressUpdate
from kvlab.store.metrics import METRICS
from kvlab.store.partial_results import PartialResults
from kvlab.store.provenance import DataProvenance, Machine
from kvlab.store.result import TrialMeasurements
from kvlab.train.tensor_files import load_final_weights
from kvlab.train.training_record import load_training_record
from kvlab.trial import initial_weights_loader as initial
from kvlab.trial.ddp import train_ddp
from kvlab.trial.trial import Trial

BENCHMARK_TEXT_TOKENS = 100_000
"""Tokens of the training text that the benchmark's generation task takes its prompts from."""

_TRAINING_RATES = ("tokens_per_second", "flops_per_second", "mfu")


class TorchTrainable:
    """Training and measurement of one trial on this machine.

    Raises:
        ResourceError: the trial requires a GPU and there is none.
        DataError: the text here differs from the text that was planned, or has too few documents
            for ``evaluation.loss_bytes``.
    """

    def __init__(self, trial: Trial, report: Callable[[ProgressUpdate], None]):
        self._trial, self._report = trial, report
        self._experiment = trial.experiment
        self._device, machine = set_up_device(trial.resources, trial.seed)
        self._machine = replace(machine, weights=self._experiment.weight_dtype(self._device))
        report({"stage": "data"})
        data = self._experiment.data
        self._dataset = prepare_dataset(data, lambda note: report({"stage": "data", "note": note}))
        digest = self._dataset.digest
        if digest != trial.data_identity:
            text = f"the text of data.source = {data.source} is not what was planned"
            raise DataError(f"{text} ({digest[:12]}, not {trial.data_identity[:12]})")
        # the driver has checked the counts of tokens; whole documents are known only here
        held_out = select_held_out(self._dataset, self._experiment, trial.seed)
        select_scored_text(held_out, self._experiment)

    def train(self, directory: Path, should_stop: Callable[[], bool], fence: Fence) -> None:
        trial, report = self._trial, self._report
        if trial.resources.training_workers > 1:
            train_ddp(trial, directory, report, should_stop, fence)
        else:
            initial.train_trial(
                trial, self._dataset, directory, self._device, report, should_stop, fence
            )

    def measure(self, directory: Path, kept: PartialResults) -> TrialMeasurements:
        training = load_training_record(directory)
        if training is None:  # moved aside since, as another trial has found it damaged
            raise RecordDamaged(f"{directory / 'training.json'} is missing")
        experiment = self._experiment
        model = GPT(experiment.model, seed=self._trial.seed).to(self._device)
        load_final_weights(model, directory)
        model.to(getattr(torch, self._machine.weights)).eval()
        report, dataset = self._report, self._dataset
        METRICS.offer(file.text for file in experiment.extensions)
        with kept.open(self._machine) as done:
            evaluation = evaluate(
                model, dataset, experiment, seed=self._trial.seed, device=self._device,
                on_progress=report, kept=done,
            )  # fmt: skip
        speed, machine = self._benchmark(model)
        measurements = {**evaluation.measurements, **speed.measurements}
        record = {**training.as_dict(), "start": initial.read_initialization_record(directory)}
        if record["steps"]:  # tables of the text that was trained on, scored as the one-shot loss
            held_out = select_held_out(dataset, experiment, self._trial.seed)
            scored, _ = select_scored_text(held_out, experiment)
            tokens = experiment.training.steps * experiment.training.batch_tokens
            measurements |= score_tables(
                dataset.train,
                scored,
                seed=self._trial.seed,
                windows=tokens // scored.block_size,
                vocab_size=experiment.data.vocab_size,
                parts=experiment.data.parts,
            )
            measurements["training_peak_bytes"] = record["peak_bytes"]
            if experiment.training.compile:
                measurements["training_compile_seconds"] = record["compile_seconds"]
            if not self._trial.resources.shares_gpu:  # else a rate is no speed
                measurements |= {f"training_{name}": record[name] for name in _TRAINING_RATES}
        facts = dataset.identity, dataset.digest, dataset.licence, dataset.tokenizer
        overlap = {str(length): share for length, share in dataset.overlap.items()}
        return TrialMeasurements(
            measurements=measurements,
            curves={
                "train_loss": record.pop("train_curve"),
                "validation_loss": record.pop("validation_curve"),
            },
            training_record=record,
            machine=machine,
            data=DataProvenance(*facts, overlap),
            items=evaluation.items,
            details=evaluation.details,
            lines=evaluation.lines,
            benchmark=[line.model_dump(mode="json", exclude_defaults=True) for line in speed.lines],
        )

    def _benchmark(self, model: GPT) -> tuple[BenchmarkResult, Machine]:
        """Measure speed, and return whether nothing else was at work on the device."""
        speed = benchmark(
            model,
            self._experiment,
            device=self._device,
            on_progress=self._report,
            tokens=self._dataset.train[:BENCHMARK_TEXT_TOKENS].tolist(),
            held_out=self._dataset.validation,
        )
        is_shared = speed.is_disturbed or self._trial.resources.shares_gpu
        return speed, replace(self._machine, timings="shared" if is_shared else "exclusive")


def set_up_device(resources: ResourcesConfig, seed: int) -> tuple[str, Machine]:
    """Set the seeds, threads and device memory of this process.

    Returns:
        The device's name in torch, and what the record says of the machine.

    Raises:
        ResourceError: a GPU is required and none is visible.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    threads = max(1, int(resources.cpus))
    torch.set_num_threads(threads)
    if resources.devices == 0:
        keep_compiled_code(processor_name())
        return "cpu", Machine(processor_name(), threads)
    if resources.shares_gpu:
        start_mps()  # before CUDA is used; without it trials on one device take turns
    if not torch.cuda.is_available():
        text = f"resources.gpus = {resources.devices:g}, and no CUDA device is visible here"
        raise ResourceError(f"{text}; set it to 0 or run where there is one")
    # Ray only schedules fractions, it does not enforce them. A whole device lifts the limit of an
    # earlier trial of this process.
    memory = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(allocator_share(resources.devices, memory))
    keep_compiled_code(f"{processor_name()} {torch.cuda.get_device_name()}")
    return "cuda", Machine(torch.cuda.get_device_name(), threads)


def keep_compiled_code(machine: str) -> None:
    """Let all processes on machines of one kind use what `torch.compile` makes in any of them.

    It is kept in the data folder, which machines may share, unless `TORCHINDUCTOR_CACHE_DIR` names
    another one or the data folder cannot be written. Code for a CPU has the instructions of the one
    that it was made on.
    """
    folder = get_data_dir() / "compiled" / re.sub(r"\W+", "-", machine)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
