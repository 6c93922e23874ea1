"""The benchmark stage of a trial."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from kvlab.benchmark.measurement import Measurement, StopRule
from kvlab.benchmark.session import BenchmarkSettings, Measure, Session, Variant
from kvlab.model import GPT
from kvlab.spec.benchmark_config import MEASURES, BenchmarkConfig, list_measures
from kvlab.spec.experiment import Experiment

MAX_REPEATS_FACTOR = 5
"""The most rounds, as a multiple of ``repeats``, while a median is not precise enough."""

OnProgress = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class BenchmarkResult:
    """What the benchmark stage measured.

    Attributes:
        measurements: the main numbers, by the names of `kvlab.store.metrics`.
        lines: every number.
        is_disturbed: other processes used the machine during a timing.
    """

    measurements: dict[str, float | int]
    lines: list[Measurement]
    is_disturbed: bool = False


def benchmark(
    model: GPT,
    experiment: Experiment,
    *,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
    tokens: Sequence[int] = (),
) -> BenchmarkResult:
    """Measure memory and speed of decoding.

    KV bytes are at batch 1 and the block size, peaks and latencies at batch 1 and the
    benchmark's lengths, ``tokens_per_second`` at the largest of its batch sizes. Timings are
    meaningful only if nothing else runs on the device; the lines state whether something did.

    Args:
        on_progress: gets ``stage`` and ``note`` after every turn. An exception that it raises
            ends the benchmark.
        tokens: token ids of the trial's own text for the measure ``task``, which needs over 256.

    Raises:
        MeasurementError: byte counts that must agree do not.
    """
    config = experiment.benchmark
    variant = Variant(experiment.name, model.to(device).eval(), experiment.serving)

    def report(note: str) -> None:
        if on_progress is not None:
            on_progress({"stage": "benchmark", "note": note})

    session = Session([variant], _settings(config, tokens), report, on_notice=report)
    lines = [line for measure in _measures(config) for line in measure(session)]
    return BenchmarkResult(_main_measurements(lines, config), lines, session.is_disturbed)


def _settings(config: BenchmarkConfig, tokens: Sequence[int]) -> BenchmarkSettings:
    return BenchmarkSettings(
        prompt_tokens=config.prompt_tokens,
        new_tokens=config.new_tokens,
        contexts=tuple(sorted({config.prompt_tokens, *config.context_lengths})),
        batches=tuple(sorted(set(config.batch_sizes))),
        stop_rule=StopRule(
            min_rounds=config.repeats,
            max_rounds=MAX_REPEATS_FACTOR * config.repeats,
            seconds=config.seconds,
        ),
        tokens=tokens,
        memory=config.memory,
    )


def _measures(config: BenchmarkConfig) -> list[Measure]:
    """Return the measures of every trial, those that `parts` names, and the roofline."""
    names = [*list_measures("always"), *(n for n in list_measures("parts") if n in config.parts)]
    names += list_measures("roofline") if config.roofline else ()
    return [import_module(MEASURES[name].module).measure for name in names]


def _main_measurements(lines: list[Measurement], config: BenchmarkConfig) -> dict[str, float | int]:
    prompt, largest = config.prompt_tokens, max(config.batch_sizes)

    def line(metric: str, **fields: object) -> Measurement:
        return next(
            candidate
            for candidate in lines
            if candidate.metric == metric
            and candidate.value is not None
            and all(getattr(candidate, name) == value for name, value in fields.items())
        )

    def value(metric: str, **fields: object) -> float | int:
        return line(metric, **fields).value or 0

    steps = line("tpot", prompt_tokens=prompt, cached=True)
    p50, p95, p99 = (quantile.value * 1000 for quantile in steps.quantiles)
    return {
        "kv_bytes_formula": value("kv_formula"),
        "kv_bytes_storage": value("kv_storage"),
        "kv_bytes_read": value("kv_read"),
        "ttft_ms": value("ttft", prompt_tokens=prompt) * 1000,
        "tpot_ms_p50": p50,
        "tpot_ms_p95": p95,
        "tpot_ms_p99": p99,
        "tpot_ms_uncached_p50": value("tpot", prompt_tokens=prompt, cached=False) * 1000,
        "tokens_per_second": value("tokens_per_second", batch_size=largest),
        "peak_bytes_cached": value("peak", cached=True),
        "peak_bytes_uncached": value("peak", cached=False),
        "peak_bytes_activations": value("peak_activations", cached=True),
    }
