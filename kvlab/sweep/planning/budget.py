"""Estimate what a plan still costs: memory, device-hours and money.

`check_memory` compares the predicted memory of trainings with that of machines, before anything
starts. To the prediction belongs the process of a trial (`process_bytes`). It is within three
tenths of what is measured, and a training that runs out of memory is retried with a smaller
microbatch. So a training is refused only if it cannot fit even then; if it is merely likely to run
out of memory, that is reported.
"""

import contextlib
import importlib.metadata
import json
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

from kvlab import layout
from kvlab.analysis.compute import seconds_between
from kvlab.data.data_dir import get_data_dir
from kvlab.errors import ResourceError, StoreError, UsageError
from kvlab.fs.atomic_files import read_json, write_json
from kvlab.humanize import format_bytes
from kvlab.layout.training_memory import process_bytes
from kvlab.machine import cpu_count, host_memory
from kvlab.own_extensions import find_member, name_members
from kvlab.spec import Experiment, ResourcesConfig
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.evaluation_config import HELLASWAG_ITEMS
from kvlab.store import Store
from kvlab.store.record_forms import refuse_malformed
from kvlab.sweep.planning.planner import Plan, PlannedTrial
from kvlab.trial.fingerprint import ID_LENGTH, fingerprint

MAX_RESULTS_READ = 64
"""Results that a rate is measured from."""

_MAX_TRIALS_SCANNED = 1000

SIMILAR_SIZE = 4
"""The most by which the parameters of a finished trial and of those to run may differ for its rate
to say something: small models reach fewer FLOPs per second than large ones."""

MEASURED_UNCERTAINTY = 1.3
"""Factor within which trials take what finished ones did: others may use the machine, too."""

_HELLASWAG_ITEM_TOKENS = 500
"""Of the four endings with their context, on average."""

_DECODED_ROWS = 64
"""As many as `kvlab.evaluate.forward_passes` decodes side by side on a CPU."""

_FLOPS_PER_BYTE = 10.0
"""What one core computes while it reads a byte of weights: some 100 GFLOP/s and 10 GB/s."""

_BENCHMARK_SECONDS = 2.0
"""Assumed for start and benchmark of a trial while no trial has shown it."""


@dataclass(frozen=True)
class TrainingRate:
    """The speed of one trial.

    Attributes:
        source: Whether a person stated it, results gave it, or it follows from a short training
            of a smaller model on this machine, or on one core of it, as the others were in use.
        measure_seconds: Duration of the measurement stage; None if unknown.
        left_out: Parts of the benchmark that these seconds do not contain.
        uncertainty: The factor, above 1, within which times are; None if unknown.
    """

    flops_per_second: float
    source: Literal["stated", "measured", "machine", "one core"]
    results: int = 0
    measure_seconds: float | None = None
    uncertainty: float | None = None
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class Budget:
    """What running a plan's missing trials takes.

    Attributes:
        trials: Number of missing trials, with the most that a search may still suggest.
        parameters: Of the smallest and of the largest model.
        flops, tokens: Of the trainings.
        peak_bytes: Predicted of the training that takes most, without its process.
        process_bytes: Of the process of a trial, in the same memory.
        device: ``GPU`` or ``CPU core``; the unit of ``hours``.
        at_once: Number of trials that share the memory.
        hours: Device-hours; None without a rate, or if some trials use GPUs and some do not.
        wall_seconds: Time with ``at_once`` trials at a time; None without ``hours``.
    """

    trials: int
    trainings: int
    parameters: tuple[int, int]
    flops: int
    tokens: int
    peak_bytes: int
    process_bytes: int
    peak_trial: str
    device: str
    memory: int | None
    at_once: int
    suggestions: int
    rate: TrainingRate | None
    hours: float | None
    wall_seconds: float | None
    money: float | None

    @property
    def total_bytes(self) -> int:
        """The memory of ``at_once`` of the largest trial with their processes."""
        return (self.peak_bytes + self.process_bytes) * self.at_once

    @property
    def fits(self) -> bool | None:
        """Whether ``at_once`` of the largest trial fit into the memory; None if unknown."""
        return None if self.memory is None else self.total_bytes <= self.memory


def estimate_budget(
    plan: Plan,
    store: Store | None,
    *,
    rate: float | None = None,
    price: float | None = None,
    memory: int | None = None,
    at_once: int = 1,
    on_calibration: Callable[[], None] | None = None,
) -> Budget | None:
    """Estimate the budget of a plan.

    Args:
        rate: Training FLOP/s of one trial; default measured from finished trials with the same
            resources and similar sizes, else from this machine's speed, if they train on CPU.
        at_once: Number of trials that run side by side in that memory, if there are as many.
        on_calibration: Called before this machine's speed is measured, which takes some seconds;
            None does not measure it, and uses it only if it is remembered.

    Returns:
        None if nothing is left to run.

    Raises:
        UsageError: A price without any rate.
    """
    missing = [planned for planned in plan.trials if not planned.has_ended]
    suggestions = 0  # to come, which are taken to cost what the base experiment does
    if plan.sweep.search is not None:
        suggestions = find_member("search", "remaining")(plan, store)
    missing += [replace(plan.trials[0], state="new")] * suggestions
    if not missing:
        return None
    training_rate = TrainingRate(rate, "stated") if rate else None
    if training_rate is None and len({planned.trial.resources for planned in missing}) == 1:
        training_rate = None if store is None else _measure_rate(plan, store, missing)
        training_rate = training_rate or _machine_rate(missing, on_calibration)
    at_once = min(at_once, len(missing))
    hours = wall_seconds = None
    if training_rate is not None and len({p.trial.resources.devices > 0 for p in missing}) == 1:
        measuring, speed = training_rate.measure_seconds or 0.0, training_rate.flops_per_second
        seconds = [p.trains * p.flops_to_do / speed + measuring for p in missing]
        units = [p.trial.resources.devices or p.trial.resources.cpus for p in missing]
        hours = sum(map(operator.mul, seconds, units)) / 3600
        wall_seconds = max(sum(seconds) / at_once, *seconds)
    if price is not None and hours is None:
        text = f"--price = {price:g} needs a rate, and no finished trial here gives one"
        raise UsageError(f"{text}; state it with --rate FLOPS")
    peaks = {p.trial.id: layout.training_peak_bytes(p.trial.experiment, memory) for p in missing}
    largest = max(peaks, key=peaks.__getitem__)
    parameters = [planned.parameters for planned in missing]
    trainings = [planned for planned in missing if planned.trains]
    return Budget(
        trials=len(missing),
        trainings=len(trainings),
        parameters=(min(parameters), max(parameters)),
        flops=sum(planned.flops_to_do for planned in trainings),
        tokens=sum(planned.tokens_to_do for planned in trainings),
        peak_bytes=peaks[largest],
        process_bytes=max(process_bytes(planned.trial.experiment) for planned in missing),
        peak_trial=largest,
        device="GPU" if any(p.trial.resources.devices for p in missing) else "CPU core",
        memory=memory,
        at_once=at_once,
        suggestions=suggestions,
        rate=training_rate,
        hours=hours,
        wall_seconds=wall_seconds,
        money=None if price is None or hours is None else hours * price,
    )


def _machine_rate(
    missing: list[PlannedTrial], on_calibration: Callable[[], None] | None
) -> TrainingRate | None:
    """Return the rate by this machine's speed; None for GPUs, and where it is not known."""
    if missing[0].trial.resources.devices:
        return None
    experiments = [planned.trial.experiment for planned in missing]
    typical = sorted(experiments, key=layout.training_flops)[len(experiments) // 2]
    threads = max(1, min(int(typical.resources.cpus), cpu_count()))
    facts = make_short_training(typical)
    # machines may share the folder
    machine = [platform.node(), os.cpu_count(), importlib.metadata.version("torch")]
    key = fingerprint({"training": facts, "threads": threads, "machine": machine})[:ID_LENGTH]
    path = get_data_dir() / "training-rates" / f"{key}.json"
    try:
        measured = read_json(path)
        speed, is_scaled = measured["flops_per_second"], measured["is_scaled"]
    except (FileNotFoundError, StoreError, ValueError, TypeError, KeyError):  # none, or damaged
        if on_calibration is None:
            return None
        on_calibration()
        measured = _measure(facts, threads)
        if measured is None:
            return None
        speed, is_scaled = measured["flops_per_second"], measured["is_scaled"]
        with contextlib.suppress(StoreError):  # not writable: the next plan measures again
            write_json(path, measured)
    seconds = median(_measuring_flops(one) / speed for one in experiments) + _BENCHMARK_SECONDS
    source: Literal["one core", "machine"] = "one core" if is_scaled else "machine"
    parts = dict.fromkeys(part for one in experiments for part in one.benchmark.parts)
    return TrainingRate(speed, source, 0, seconds, UNCERTAINTY, tuple(parts))


def _measuring_flops(experiment: Experiment) -> float:
    """Return the FLOPs of the losses, of HellaSwag and of the timed texts.

    A decoded token counts at least as what a CPU computes while it reads the weights, once for all
    rows that are decoded side by side.
    """
    model, evaluation, bench = experiment.model, experiment.evaluation, experiment.benchmark
    block, serving = model.block_size, layout.KVLayout.of(model, experiment.serving)
    items = evaluation.hellaswag_items
    of_items = (HELLASWAG_ITEMS if items is None else items) * _HELLASWAG_ITEM_TOKENS
    of_token = layout.forward_flops(model, block) / block
    of_read = 4 * layout.parameter_count(model) * _FLOPS_PER_BYTE
    flops = (evaluation.loss_tokens + of_items) * of_token
    if evaluation.served:
        tokens = (evaluation.served_tokens or evaluation.loss_tokens) + of_items
        steps = block * -(-tokens // (block * _DECODED_ROWS))
        passes = 1 + (serving.storage_dtype(MODEL_DTYPE) != MODEL_DTYPE)
        flops += passes * max(tokens * of_token, steps * of_read)
    # a warm-up, too; each is a prompt, new tokens and a step without a cache
    return flops + (1 + bench.repeats) * (
        2 * bench.prompt_tokens * of_token + bench.new_tokens * max(of_token, of_read)
    )


def _measure_rate(plan: Plan, store: Store, missing: list[PlannedTrial]) -> TrainingRate | None:
    """Return the median rate of finished trials with the resources and sizes of this plan's."""
    needed = missing[0].trial.resources
    size = median(planned.parameters for planned in missing)
    rates, measure_seconds = [], []
    own = [planned.trial.id for planned in plan.trials if planned.state == "done"]
    for trial_id in dict.fromkeys((*own, *store.trial_ids()[:_MAX_TRIALS_SCANNED])):
        # a damaged result gives no rate, nor one of a version that recorded less
        with contextlib.suppress(StoreError), refuse_malformed(trial_id):
            result = store.result(trial_id) if store.status(trial_id) == "done" else None
            training = (result or {}).get("training_record") or {}
            if result is None or not training.get("seconds"):
                continue
            used, sizes = result["experiment"]["resources"], result["model"]
            is_alike = (used["gpus"], used["cpus"]) == (needed.gpus, needed.cpus)
            is_near = 1 / SIMILAR_SIZE <= sizes["parameters"] / size <= SIMILAR_SIZE
            if not is_alike or not is_near or not sizes["training_flops"]:
                continue
            provenance = result["provenance"]
            rates.append(sizes["training_flops"] / training["seconds"])
            if provenance["attempts"] == 1 and not training.get("resumed_from"):
                attempt = seconds_between(provenance["started"], provenance["finished"])
                measure_seconds.append(attempt - training["seconds"])
        if len(rates) == MAX_RESULTS_READ:
            break
    if not rates:
        return None
    measured = max(0.0, median(measure_seconds)) if measure_seconds else None
    return TrainingRate(median(rates), "measured", len(rates), measured, MEASURED_UNCERTAINTY)


# How fast this machine trains, measured once and remembered in the user's cache folder. What is
# trained is a model of few layers and otherwise the shape of the one that is planned, in its
# precision: the rate depends on these more than on anything else.


UNCERTAINTY = 2.0
"""Trainings take between a half and twice the time that the rates here give."""

LAYERS = 2
"""Most layers of the model that is trained."""

STEP_TOKENS = 1024
"""Of a step at most, if a block is not longer. Small steps spend more of their time outside
products, and in the optimizer."""

_SHAPE = (
    "vocab_size", "block_size", "n_head", "n_embd", "mlp", "ffn_dim", "position", "norm", "bias",
    "tie_embeddings",
)  # fmt: skip


def make_short_training(experiment: Experiment) -> dict[str, Any]:
    """Return, as plain data, an experiment of few layers and short steps for the measurement."""
    model = experiment.model.model_dump(mode="json")
    training = experiment.training.model_dump(mode="json")
    block = model["block_size"]
    tokens = max(block, min(experiment.training.batch_tokens, STEP_TOKENS) // block * block)
    return {
        "name": "speed",
        "model": {**{key: model[key] for key in _SHAPE}, "n_layer": min(model["n_layer"], LAYERS)},
        "data": {"tokenizer": "bytes"},
        "training": {
            "tokens": 8 * tokens, "batch_tokens": tokens, "evaluate_tokens": block,
            "precision": training["precision"], "optimizer": training["optimizer"],
            **{key: training[key] for key in name_members("linear_products") if training[key]},
        },
        "benchmark": {"prompt_tokens": 1, "new_tokens": 1},
    }  # fmt: skip


def _measure(facts: dict[str, Any], threads: int) -> dict[str, Any] | None:
    """Return what `kvlab.trial.speed_test.measure_training_rate` does, in another process."""
    command = [sys.executable, "-P", "-m", "kvlab.trial.speed_test"]  # -P: no working folder
    try:
        answer = subprocess.run(
            command,
            input=json.dumps({"experiment": facts, "threads": threads}).encode(),
            capture_output=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            check=True,
        )
        return dict(json.loads(answer.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


# Memory


LOWER_BOUND_FACTOR = 0.75
"""Of the prediction: no measured training took less."""


@dataclass(frozen=True)
class MachineMemory:
    """The memory of one machine."""

    host: int
    device: int
    cores: int

    def at_once(self, resources: ResourcesConfig) -> int:
        """Return how many trials with these resources share the memory that they train in."""
        fit = 1 / resources.devices if resources.devices else self.cores / resources.cpus
        return max(1, int(fit + 1e-6))


def measure_machine_memory(_: str = "") -> MachineMemory:
    """Return the memory of this machine, without importing torch.

    The argument is not used: an executor runs functions of one string on its machines.
    """
    import pynvml  # type: ignore[import-untyped]

    sizes = []
    with contextlib.suppress(pynvml.NVMLError):  # no library, or no driver
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        sizes = [int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
        pynvml.nvmlShutdown()
    return MachineMemory(host_memory(), max(sizes, default=0), cpu_count())


def check_memory(
    missing: Iterable[PlannedTrial], machines: Iterable[MachineMemory], one_at_a_time: bool
) -> Iterator[str]:
    """Yield a line for each request whose trainings are likely to run out of memory.

    Raises:
        ResourceError: A training cannot fit, however small its microbatch.
    """
    machines, reported = list(machines), set()
    for planned in missing:
        experiment = planned.trial.experiment
        on_device, overhead = experiment.resources.devices > 0, process_bytes(experiment)
        memory = max((m.device if on_device else m.host for m in machines), default=0)
        if not planned.trains or not memory:
            continue
        owner = "a GPU" if on_device else "the largest machine"
        name = f"trial {planned.trial.id[:8]} ({planned.label})"
        smallest = planned.with_resources(microbatch_tokens=experiment.model.block_size)
        tensors = layout.training_peak_bytes(smallest.trial.experiment)
        needed = LOWER_BOUND_FACTOR * (tensors + overhead)
        if needed > memory:
            text = f"{name} cannot be trained here: at least {format_bytes(needed)} of memory, even"
            text += f" at one row of {experiment.model.block_size} tokens at once, and {owner} has"
            hint = "use a smaller model or a larger machine"
            raise ResourceError(f"{text} {format_bytes(memory)}; {hint}")
        count = 1 if one_at_a_time else min(m.at_once(experiment.resources) for m in machines)
        peak = overhead + layout.training_peak_bytes(experiment, max(1, memory - overhead))
        if peak * count > memory and experiment.resources not in reported:
            reported.add(experiment.resources)
            text = f"memory may run out: {name} is predicted to take {format_bytes(peak)}"
            hint = "lower resources.microbatch_tokens"
            if count > 1:
                text += f", and {count} such trials at once {format_bytes(peak * count)}"
                field = "gpus" if on_device else "cpus"
                hint += f" or raise resources.{field} so that fewer run at once"
            yield f"{text}, of {format_bytes(memory)} that {owner} has; {hint}"
