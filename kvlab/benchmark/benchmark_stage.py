"""The benchmark stage of a trial."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from kvlab.benchmark.measurement import Measurement, StopRule
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
from kvlab.model import GPT
from kvlab.spec.benchmark_config import MEASURES, BenchmarkConfig, measure_names
from kvlab.spec.experiment import Experiment

MAX_REPEATS_FACTOR = 5
"""Rounds at most, as a multiple of ``repeats``, where a median is not known well enough."""

Measure = Callable[[Session], Iterator[Measurement]]
OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BenchmarkResult:
    """``measurements`` by the names of `kvlab.store.metrics`; ``lines`` is everything.

    ``disturbed``: other processes used the machine's cores while something was timed.
    """

    measurements: dict[str, float | int]
    lines: list[Measurement]
    disturbed: bool = False


def benchmark(
    model: GPT,
    experiment: Experiment,
    *,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
    tokens: Sequence[int] = (),
) -> BenchmarkResult:
    """Memory and speed of decoding.

    KV bytes are at batch 1 and the block size, peaks and latencies at batch 1 and the
    benchmark's lengths, ``tokens_per_second`` at the largest of its batch sizes. Timings mean
    something only if nothing else runs on the device meanwhile; lines say if something did.

    Args:
        on_progress: gets ``stage`` and ``note`` after every run. What it raises ends it.
        tokens: of the trial's own text, for the part ``task``, which needs over 256.

    Raises:
        MeasurementError: byte counts that must agree do not.
    """
    config = experiment.benchmark
    variant = Variant(experiment.name, model.to(device).eval(), experiment.serving)
    settings = BenchmarkSettings(
        prompt_tokens=config.prompt_tokens,
        new_tokens=config.new_tokens,
        contexts=tuple(sorted({config.prompt_tokens, *config.context_lengths})),
        batches=tuple(sorted(set(config.batch_sizes))),
        rule=StopRule(
            least=config.repeats, most=MAX_REPEATS_FACTOR * config.repeats, seconds=config.seconds
        ),
        tokens=tokens,
        memory=config.memory,
    )

    def tick(note: str) -> None:
        if on_progress is not None:
            on_progress({"stage": "benchmark", "note": note})

    session = Session([variant], settings, tick, say=tick)
    lines = [line for measure in _measures(config) for line in measure(session)]
    return BenchmarkResult(_measurements(lines, experiment), lines, session.disturbed)


def _measures(config: BenchmarkConfig) -> list[Measure]:
    """The measures of a trial: those of every trial, those that `parts` names, the roofline."""
    names = [*measure_names("always"), *(n for n in measure_names("parts") if n in config.parts)]
    names += measure_names("roofline") if config.roofline else ()
    return [import_module(MEASURES[name].module).measure for name in names]


def _measurements(lines: list[Measurement], experiment: Experiment) -> dict[str, float | int]:
    config = experiment.benchmark
    prompt, largest = config.prompt_tokens, max(config.batch_sizes)

    def value(metric: str, **fields: object) -> float | int:
        for line in lines:
            same = all(getattr(line, name) == wanted for name, wanted in fields.items())
            if line.metric == metric and same and line.value is not None:
                return line.value
        raise AssertionError(f"every trial measures {metric}")

    steps = next(
        line
        for line in lines
        if line.metric == "tpot" and line.prompt_tokens == prompt and line.cached
    )
    p50, p95, p99 = (quantile.value * 1000 for quantile in steps.quantiles)
    again = value("tpot", prompt_tokens=prompt, cached=False)
    return {
        "kv_bytes_formula": value("kv_formula"),
        "kv_bytes_storage": value("kv_storage"),
        "kv_bytes_read": value("kv_read"),
        "ttft_ms": value("ttft", prompt_tokens=prompt) * 1000,
        "tpot_ms_p50": p50,
        "tpot_ms_p95": p95,
        "tpot_ms_p99": p99,
        "tpot_ms_uncached_p50": again * 1000,
        "tokens_per_second": value("tokens_per_second", batch_size=largest),
        "peak_bytes_cached": value("peak", cached=True),
        "peak_bytes_uncached": value("peak", cached=False),
        "peak_bytes_activations": value("peak_activations", cached=True),
    }
