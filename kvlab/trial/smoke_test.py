"""The smoke test: a few training steps of an architecture before it trains for hours.

A few microbatches of random tokens go forward and backward, the optimizer steps, some tokens are
scored one-shot and through the serving cache, and the benchmark's largest cache is filled. The
record keeps nothing of it. The result is a file for the driver: what failed, or the peak memory.
"""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvlab.fs.atomic_files import write_json
from kvlab.spec import ResourcesConfig
from kvlab.spec.experiment import Experiment
from kvlab.store.provenance import redact_paths
from kvlab.store.result import Failure
from kvlab.trial.trial import Trial

if TYPE_CHECKING:
    import torch

    from kvlab.model import GPT

STEPS = 2
"""Training steps: the second one finds the optimizer's state allocated."""

MICROBATCHES = 2
"""Microbatches per step, so that gradients are accumulated."""

DECODED_TOKENS = 8


@dataclass(frozen=True)
class SmokeTest:
    """One task of an executor. Plain data, picklable.

    Attributes:
        id: names the task.
        experiment: the trial's, on one device and at one worker's share of a step.
        seed: of the weights and the tokens.
        result_path: where the `SmokeResult` is written.
    """

    id: str
    experiment: Experiment
    seed: int
    result_path: str

    @classmethod
    def of(cls, trial: Trial, result_path: Path) -> "SmokeTest":
        """Return the smoke test of a trial's architecture."""
        experiment = _reduce_to_one_worker(trial.experiment)
        return cls(f"smoke-{trial.id}", experiment, trial.seed, str(result_path))

    @property
    def resources(self) -> ResourcesConfig:
        return self.experiment.resources


@dataclass(frozen=True)
class SmokeResult:
    """The result of a smoke test.

    Attributes:
        peak_bytes: on CUDA the most that the allocator reserved, on CPU the growth of the
            resident size.
        device_bytes: memory of the GPU; None on CPU.
        microbatch_tokens: of the forward passes.
        failure: what failed, if something did.
        traceback: of the failure.
    """

    peak_bytes: int | None = None
    device_bytes: int | None = None
    microbatch_tokens: int | None = None
    failure: Failure | None = None
    traceback: str | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SmokeResult":
        failure = data["failure"]
        return cls(**{**data, "failure": Failure.from_dict(failure) if failure else None})

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "failure": self.failure.as_dict() if self.failure else None}


def run_smoke_test(test: SmokeTest) -> Literal["done", "failed"]:
    """Run the test and write its `SmokeResult`.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        result = _measure(test)
    except Exception as error:
        trace = redact_paths(traceback.format_exc())
        result = SmokeResult(failure=Failure.from_error(error), traceback=trace)
    write_json(test.result_path, result.to_json())
    return "done" if result.failure is None else "failed"


def _reduce_to_one_worker(experiment: Experiment) -> Experiment:
    """Return the experiment on one device, with as many tokens per step as one worker takes."""
    resources, training = experiment.resources, experiment.training
    tokens = training.batch_tokens // resources.training_workers
    one_device = {"gpus": min(1.0, resources.devices), "workers": 1}
    return experiment.model_copy(
        update={
            "resources": resources.model_copy(update=one_device),
            "training": training.model_copy(update={"batch_tokens": tokens}),
        }
    )


def _measure(test: SmokeTest) -> SmokeResult:
    import torch

    from kvlab.train.train_step import device_microbatch_rows
    from kvlab.trial.torch_trainable import set_up_device

    device_name, _ = set_up_device(test.resources, test.seed)
    device = torch.device(device_name)
    rows = device_microbatch_rows(test.experiment, device)
    result = _measure_memory(device, lambda: _train_and_score(test, device, rows))
    return replace(result, microbatch_tokens=rows * test.experiment.model.block_size)


def _train_and_score(test: SmokeTest, device: "torch.device", rows: int) -> None:
    import torch

    from kvlab.model import GPT

    model = GPT(test.experiment.model, seed=test.seed).to(device)
    model.trained_kv = test.experiment.training.kv
    if test.experiment.training.steps:
        _train(model, _shorten(test.experiment, rows), test.seed)
    dtype = getattr(torch, test.experiment.weight_dtype(device.type))
    _score(model.to(dtype).eval(), test.experiment)


def _shorten(experiment: Experiment, rows: int) -> Experiment:
    """Return the experiment with a step of at most `MICROBATCHES`, of ``rows`` rows each."""
    block, training = experiment.model.block_size, experiment.training
    microbatches = min(training.batch_tokens // block // rows, MICROBATCHES)
    step = {"batch_tokens": microbatches * rows * block, "evaluate_tokens": block}
    microbatch = {"microbatch_tokens": rows * block}
    return experiment.model_copy(
        update={
            "training": training.model_copy(update=step),
            "resources": experiment.resources.model_copy(update=microbatch),
        }
    )


@dataclass(frozen=True)
class _RandomTokens:
    """Random token ids in place of a dataset."""

    train: Any
    validation: Any


def _draw_tokens(experiment: Experiment, seed: int) -> _RandomTokens:
    import numpy as np

    model = experiment.model
    tokens = np.random.default_rng(seed).integers(model.vocab_size, size=4 * model.block_size + 1)
    return _RandomTokens(tokens, tokens)


def _train(model: "GPT", experiment: Experiment, seed: int) -> None:
    from kvlab.train.divergence import check_finite
    from kvlab.train.train_step import TrainStepper

    stepper = TrainStepper(model, _draw_tokens(experiment, seed), experiment, seed)
    stepper.connect_workers()
    for step in range(STEPS):
        stepper.step(step)
    check_finite("validation loss", stepper.validation_loss(), experiment.training, STEPS)


def _score(model: "GPT", experiment: Experiment) -> None:
    """Run a pass as large as evaluation's, its largest serving cache, and the benchmark's."""
    import torch

    from kvlab.benchmark.decode_timing import TimedDecoder
    from kvlab.errors import MeasurementError
    from kvlab.evaluate.forward_passes import decode_rows, pass_rows

    block, vocabulary = experiment.model.block_size, model.config.vocab_size
    serving, benchmark = experiment.serving, experiment.benchmark
    with torch.inference_mode():
        tokens = torch.randint(vocabulary, (pass_rows(model, block), block))
        model.hidden_states(tokens.to(model.device))
        rows = decode_rows(model, block, serving)
        cache = model.new_cache(rows, block, serving)
        for position in range(min(DECODED_TOKENS, block)):
            token = torch.full((rows, 1), position % vocabulary, device=model.device)
            logits = model.compute_logits(model.hidden_states(token, cache=cache))
        if not bool(logits.isfinite().all()):
            text = "logits through the serving cache are not finite at the initial weights"
            raise MeasurementError(f"{text}; the cache or the model is wrong")
        del cache, logits
    decoder = TimedDecoder(model, serving)
    length = min(benchmark.prompt_tokens + 2, block)
    cache = decoder.new_cache(max(benchmark.batch_sizes), length)
    decoder.decode(cache, length - benchmark.prompt_tokens)


def _measure_memory(device: "torch.device", work: Callable[[], None]) -> SmokeResult:
    """Return the peak memory of ``work``, of which nothing stays on the device."""
    import torch

    from kvlab.benchmark.peak_memory import measure_peak_memory

    use = measure_peak_memory(device, work, reserved=True)
    if device.type != "cuda":
        return SmokeResult(peak_bytes=use.growth)
    return SmokeResult(use.peak, torch.cuda.get_device_properties(device).total_memory)
