"""The smoke test: one step of an architecture before anybody trains it for hours.

A few microbatches of random tokens go forward and backward, the optimizer steps, some tokens are
scored in one shot and through the serving cache, and the benchmark's largest cache is decoded
into. Nothing of it enters a record but a file for the driver: what broke, or how much memory it
took at most.
"""

import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvlab.fs.atomic_files import write_json
from kvlab.spec.experiment import Experiment
from kvlab.store import Store
from kvlab.store.attempt import Attempt
from kvlab.store.failure import Failure
from kvlab.store.provenance import Origin, build_provenance, redact_paths
from kvlab.store.result import build_result, trial_facts
from kvlab.trial.finalize import claim_ending
from kvlab.trial.run import Outcome, run_trial
from kvlab.trial.trial import Trial

if TYPE_CHECKING:
    import torch

    from kvlab.model import GPT

STEPS, DECODED_TOKENS = 2, 8
"""Steps that are taken, since the second finds the optimizer's state there; tokens decoded."""

MICROBATCHES = 2
"""Of each of those steps, so that gradients are added up."""


@dataclass(frozen=True)
class SmokeTest(Trial):
    """What an executor is given instead of a trial; ``answer`` is where the outcome is written."""

    answer: str = ""

    @classmethod
    def like(cls, trial: Trial, answer: Path) -> "SmokeTest":
        """The smoke test of a trial's architecture, on one device of its resources."""
        resources = trial.experiment.resources
        one = {"gpus": min(1.0, resources.devices), "workers": 1}
        smaller = trial.experiment.model_copy(
            update={"resources": resources.model_copy(update=one)}
        )
        whole = trial.experiment.resources.training_workers
        return cls(
            id=f"smoke-{trial.id}",
            training_id=trial.training_id,
            experiment=_shrink_to_one_worker(smaller, whole),
            seed=trial.seed,
            data_identity=trial.data_identity,
            answer=str(answer),
        )


@dataclass(frozen=True)
class SmokeResult:
    """What a smoke test found.

    Attributes:
        peak_bytes: the most memory that it took: on CUDA what the allocator reserved, on CPU by
            how much the resident size rose.
        device_bytes: of the GPU; None on CPU.
        microbatch_tokens: of the forward passes.
        failure, traceback: what broke, if something did.
    """

    peak_bytes: int | None = None
    device_bytes: int | None = None
    microbatch_tokens: int | None = None
    failure: dict[str, str | None] | None = None
    traceback: str | None = None


def run_task(
    trial: Trial,
    store: str | Path,
    *,
    origin: Origin,
    capture_output: bool = False,
    wait: bool = True,
) -> Outcome:
    """What an executor runs: a trial (`run_trial`), or the smoke test of one.

    Raises:
        StoreError: nothing can be written.
    """
    if isinstance(trial, SmokeTest):
        return run_smoke_test(trial)
    return run_trial(trial, store, origin=origin, capture_output=capture_output, wait=wait)


def run_smoke_test(smoke: SmokeTest) -> Literal["done", "failed"]:
    """Takes the steps, and writes a `SmokeAnswer`.

    Raises:
        StoreError: it cannot be written.
    """
    try:
        answer = _take_steps(smoke)
    except Exception as error:
        text = redact_paths(traceback.format_exc())
        answer = SmokeResult(failure=Failure.of(error).as_dict(), traceback=text)
    write_json(smoke.answer, asdict(answer))
    return "done" if answer.failure is None else "failed"


def record_smoke_failure(trial: Trial, store: Store, origin: Origin, answer: SmokeResult) -> bool:
    """Ends a trial whose architecture is broken, with the smoke test's traceback.

    Returns:
        Whether it was recorded: not if some process runs it, or it has ended after all.
    """
    assert answer.failure is not None, "only what broke is recorded"
    with claim_ending(trial, store, over=("damaged", "pruned")) as free:
        if free:
            store.write_trial(trial.id, trial_facts(trial))
            attempt = Attempt(store, trial.id)
            attempt.log("not run: one step of its architecture failed in the smoke test")
            trace = attempt.write_traceback(answer.traceback or "")
            kind, name, text = (answer.failure[key] for key in ("class", "type", "message"))
            failure = Failure(kind, str(name), f"in the smoke test: {text}", trace)  # type: ignore[arg-type]
            made = build_provenance(origin, started=attempt.started, attempts=attempt.number)
            store.write_result(build_result(trial, "failed", made, failure=failure))
        return free


def _shrink_to_one_worker(experiment: Experiment, workers: int) -> Experiment:
    """The experiment with a step of as many tokens as one of its workers takes."""
    training = experiment.training
    share = training.model_copy(update={"batch_tokens": training.batch_tokens // workers})
    return experiment.model_copy(update={"training": share})


def _take_steps(smoke: SmokeTest) -> SmokeResult:
    import torch

    from kvlab.train.train_step import device_microbatch_rows
    from kvlab.trial.stages import set_up_device

    kind, _ = set_up_device(smoke)
    device = torch.device(kind)
    rows = device_microbatch_rows(smoke.experiment, device)
    answer = _measure_memory(device, lambda: _train_and_score(smoke, device, rows))
    return replace(answer, microbatch_tokens=rows * smoke.experiment.model.block_size)


def _train_and_score(smoke: SmokeTest, device: "torch.device", rows: int) -> None:
    from kvlab.model import GPT

    model = GPT(smoke.experiment.model, seed=smoke.seed).to(device)
    if smoke.experiment.training.steps:
        _train(model, _shorten(smoke.experiment, rows), smoke.seed)
    _score(model.eval(), smoke.experiment)


def _shorten(experiment: Experiment, rows: int) -> Experiment:
    """A step of `MICROBATCHES` at most, each of as many rows as in the real one."""
    block, training = experiment.model.block_size, experiment.training
    most = training.batch_tokens // block // rows
    tokens = min(most, MICROBATCHES) * rows * block
    parts = {
        "training": training.model_copy(update={"batch_tokens": tokens, "evaluate_tokens": block}),
        "resources": experiment.resources.model_copy(update={"microbatch_tokens": rows * block}),
    }
    return experiment.model_copy(update=parts)


@dataclass(frozen=True)
class _RandomTokens:
    """Tokens as a dataset holds them, out of the whole vocabulary."""

    train: Any
    validation: Any


def _draw_tokens(experiment: Experiment, seed: int) -> _RandomTokens:
    import numpy as np

    model = experiment.model
    drawn = np.random.default_rng(seed).integers(model.vocab_size, size=4 * model.block_size + 1)
    return _RandomTokens(drawn, drawn)


def _train(model: "GPT", experiment: Experiment, seed: int) -> None:
    from kvlab.train.divergence import check_finite
    from kvlab.train.train_step import TrainStepper

    stepper = TrainStepper(model, _draw_tokens(experiment, seed), experiment, seed)
    stepper.join()
    for step in range(STEPS):
        stepper.step(step)
    check_finite("validation loss", stepper.validation_loss(), experiment.training, STEPS)


def _score(model: "GPT", experiment: Experiment) -> None:
    """One pass as large as evaluation's, its largest serving cache, and the benchmark's."""
    import torch

    from kvlab.benchmark.decode_timing import TimedDecoder
    from kvlab.errors import MeasurementError
    from kvlab.evaluate.forward_passes import decode_rows, pass_rows

    block, bench = experiment.model.block_size, experiment.benchmark
    serving = experiment.serving
    with torch.inference_mode():
        tokens = torch.randint(model.config.vocab_size, (pass_rows(model, block), block))
        model.hidden(tokens.to(model.device))
        rows = decode_rows(model, block, serving)
        cache = model.new_cache(rows, block, serving)
        for at in range(min(DECODED_TOKENS, block)):
            token = torch.full((rows, 1), at % model.config.vocab_size, device=model.device)
            logits = model.head(model.hidden(token, cache=cache))
        if not bool(logits.isfinite().all()):
            text = "logits through the serving cache are no numbers at first weights"
            raise MeasurementError(f"{text}; the cache or the model is wrong")
        del cache, logits
    decoder = TimedDecoder(model, serving)
    length = min(bench.prompt_tokens + 2, block)
    decoder.decode(decoder.new_cache(max(bench.batch_sizes), length), length - bench.prompt_tokens)


def _measure_memory(device: "torch.device", work: Callable[[], None]) -> SmokeResult:
    """Does the work and says what it took at most; nothing of it stays on the device."""
    import torch

    if device.type != "cuda":
        from kvlab.benchmark.peak_memory import resident_growth

        return SmokeResult(peak_bytes=resident_growth(work))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        work()
        peak = torch.cuda.max_memory_reserved(device)
    finally:
        torch.cuda.empty_cache()
    return SmokeResult(peak, torch.cuda.get_device_properties(device).total_memory)
