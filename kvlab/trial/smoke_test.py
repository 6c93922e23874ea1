"""The smoke test: a few training steps of an architecture before it trains for hours.

A few microbatches of random tokens go forward and backward, the optimizer steps, some tokens are
scored one-shot and through the serving cache, and the benchmark's largest cache is filled. The
record keeps nothing of it.
"""

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        experiment: the trial's, on one device and at one worker's share of a step. Nothing is
            compiled, which takes minutes, unless the memory is to be measured.
        seed: of the weights and the tokens.
    """

    id: str
    experiment: Experiment
    seed: int

    @classmethod
    def of(cls, trial: Trial) -> "SmokeTest":
        """Return the smoke test of a trial's architecture."""
        asked, training = trial.resources, trial.experiment.training
        step: dict[str, Any] = {"batch_tokens": training.batch_tokens // asked.training_workers}
        step["compile"] = training.compile and asked.gpus == "auto"  # else memory decides nothing
        experiment = _change(trial.experiment, training=step, serving={"compile": False})
        experiment = experiment.model_copy(update={"resources": asked.one_worker})
        return cls(f"smoke-{trial.id}", experiment, trial.seed)

    @property
    def resources(self) -> ResourcesConfig:
        return self.experiment.resources


@dataclass(frozen=True)
class SmokeResult:
    """The result of a smoke test. Plain data, picklable.

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


def run_smoke_test(test: SmokeTest) -> SmokeResult:
    """Return what failed, or the peak memory."""
    try:
        return _measure(test)
    except Exception as error:
        trace = redact_paths(traceback.format_exc())
        return SmokeResult(failure=Failure.from_error(error), traceback=trace)


def _change(experiment: Experiment, **sections: dict[str, Any]) -> Experiment:
    """Return an experiment with other values in some of its sections."""
    changed = {
        name: getattr(experiment, name).model_copy(update=values)
        for name, values in sections.items()
    }
    return experiment.model_copy(update=changed)


def _measure(test: SmokeTest) -> SmokeResult:
    """Return the peak memory of what is tried, of which nothing stays on the device."""
    import torch

    from kvlab.benchmark.peak_memory import measure_peak_memory
    from kvlab.train.train_step import device_microbatch_rows
    from kvlab.trial.torch_trainable import set_up_device

    device = torch.device(set_up_device(test.resources, test.seed)[0])
    rows = device_microbatch_rows(test.experiment, device)
    use = measure_peak_memory(device, lambda: _train_and_score(test, device, rows), reserved=True)
    tokens = rows * test.experiment.model.block_size
    if device.type != "cuda":
        return SmokeResult(use.growth, None, tokens)
    return SmokeResult(use.peak, torch.cuda.get_device_properties(device).total_memory, tokens)


def _train_and_score(test: SmokeTest, device: "torch.device", rows: int) -> None:
    """Take steps of at most `MICROBATCHES`, of ``rows`` rows each, on random tokens; then score."""
    import numpy as np
    import torch

    from kvlab.model import GPT
    from kvlab.train.train_step import TrainStepper, check_finite

    experiment, block = test.experiment, test.experiment.model.block_size
    model = GPT(experiment.model, seed=test.seed).to(device)
    model.trained_kv = experiment.training.kv
    if experiment.training.steps:
        microbatches = min(experiment.training.batch_tokens // block // rows, MICROBATCHES)
        tokens = {"batch_tokens": microbatches * rows * block, "evaluate_tokens": block}
        microbatch = {"microbatch_tokens": rows * block}
        short = _change(experiment, training=tokens, resources=microbatch)
        random = np.random.default_rng(test.seed)
        text = random.integers(experiment.model.vocab_size, size=4 * block + 1)
        stepper = TrainStepper(model, RandomTokens(text, text), short, test.seed)
        stepper.connect_workers()
        for step in range(STEPS):
            stepper.step(step)
        check_finite("validation loss", stepper.validation_loss(), short.training, STEPS)
    dtype = getattr(torch, experiment.weight_dtype(device.type))
    _score(model.to(dtype).eval(), experiment)


@dataclass(frozen=True)
class RandomTokens:
    """Random token ids in place of a dataset."""

    train: Any
    validation: Any


def _score(model: "GPT", experiment: Experiment) -> None:
    """Run a pass as large as evaluation's, its largest serving cache, and the benchmark's."""
    import torch

    from kvlab.benchmark.decode_timing import DecodeRun
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
    length = min(benchmark.prompt_tokens + 2, block)
    cache = model.new_cache(max(benchmark.batch_sizes), length, serving)
    DecodeRun(model, cache, length - benchmark.prompt_tokens).time()
