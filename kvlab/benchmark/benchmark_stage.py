"""The benchmark stage of a trial."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from kvlab.benchmark.measurement import Measurement, StopRule
from kvlab.benchmark.session import BenchmarkSettings, Measure, Session, Variant
from kvlab.model import GPT
from kvlab.spec.benchmark_config import MEASURES, BenchmarkConfig, list_measures
from kvlab.spec.conversations_config import MAX_REUSE_TURNS
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


@dataclass(frozen=True)
class JointTimings:
    """What `time_together` measured.

    Attributes:
        measurements, lines: of each variant by its name, as in `BenchmarkResult`.
        disturbance: what else used the machine meanwhile; empty if nothing did.
    """

    measurements: dict[str, dict[str, float | int]]
    lines: dict[str, list[Measurement]]
    disturbance: str


def benchmark(
    model: GPT,
    experiment: Experiment,
    *,
    device: str | torch.device = "cpu",
    on_progress: OnProgress | None = None,
    tokens: Sequence[int] = (),
    held_out: Sequence[int] = (),
) -> BenchmarkResult:
    """Measure memory and speed of decoding.

    KV bytes are at batch 1 and the block size, peaks and latencies at batch 1 and the
    benchmark's lengths, ``tokens_per_second`` at the largest of its batch sizes. Timings are
    meaningful only if nothing else runs on the device; the lines state whether something did.

    Args:
        on_progress: gets ``stage`` and ``note`` after every turn. An exception that it raises
            ends the benchmark.
        tokens: token ids of the trial's own text for the measure ``task``, which needs over 256.
        held_out: token ids of its held-out text for the measure ``conversations``.

    Raises:
        DataError: ``held_out`` is too short for the load of conversations.
        MeasurementError: byte counts that must agree do not.
    """
    config = experiment.benchmark
    variant = Variant(experiment.name, model.to(device).eval(), experiment.serving)

    def report(note: str) -> None:
        if on_progress is not None:
            on_progress({"stage": "benchmark", "note": note})

    settings = replace(_settings(config, tokens), conversation_tokens=held_out)
    session = Session([variant], settings, report, on_notice=report)
    lines: list[Measurement] = []
    for name in _select_measures(config):
        lines += _load_measure(name)(session)
    measurements = {
        **_memory_measurements(lines),
        **_timing_measurements(lines, config),
        **_reuse_measurements(lines),
    }
    return BenchmarkResult(measurements, lines, session.is_disturbed)


def time_together(
    variants: list[Variant],
    config: BenchmarkConfig,
    *,
    on_turn: Callable[[], None],
    tokens: Sequence[int] = (),
) -> JointTimings:
    """Take the times of several variants in one session, where every round runs each once.

    Args:
        variants: on one device, in evaluation mode, with names of their own.
        config: what is measured; that of every variant.
        on_turn: called after every turn. An exception that it raises ends the session.
        tokens: see `benchmark`.
    """
    settings = _settings(config, tokens, len(variants))
    session = Session(variants, settings, lambda _note: on_turn())
    timed = [name for name in _select_measures(config) if MEASURES[name].is_timed]
    lines: dict[str, list[Measurement]] = {variant.name: [] for variant in variants}
    for name in timed:
        for line in _load_measure(name)(session):
            if line.against is None:  # ratios of trials are those of their own numbers
                lines[line.variant].append(line)
    measurements = {name: _timing_measurements(own, config) for name, own in lines.items()}
    return JointTimings(measurements, lines, session.disturbance)


def _settings(
    config: BenchmarkConfig, tokens: Sequence[int], variants: int = 1
) -> BenchmarkSettings:
    return BenchmarkSettings(
        prompt_tokens=config.prompt_tokens,
        new_tokens=config.new_tokens,
        contexts=tuple(sorted({config.prompt_tokens, *config.context_lengths})),
        batches=tuple(sorted(set(config.batch_sizes))),
        stop_rule=StopRule(
            min_rounds=config.repeats,
            max_rounds=MAX_REPEATS_FACTOR * config.repeats,
            seconds=config.seconds * variants,
        ),
        tokens=tokens,
        memory=config.memory,
        settles_comparisons=False,
        conversations=config.conversations,
    )


def _select_measures(config: BenchmarkConfig) -> list[str]:
    """Return the measures of every trial, those that `parts` names, and those whose key is set."""
    names = [*list_measures("always"), *(n for n in list_measures("parts") if n in config.parts)]
    return [*names, *(name for name in list_measures("key") if getattr(config, name))]


def _load_measure(name: str) -> Measure:
    measure: Measure = import_module(MEASURES[name].module).measure
    return measure


def _memory_measurements(lines: list[Measurement]) -> dict[str, float | int]:
    return {
        "kv_bytes_formula": _find_value(lines, "kv_formula"),
        "kv_bytes_storage": _find_value(lines, "kv_storage"),
        "kv_bytes_read": _find_value(lines, "kv_read"),
        "peak_bytes_cached": _find_value(lines, "peak", cached=True),
        "peak_bytes_uncached": _find_value(lines, "peak", cached=False),
        "peak_bytes_activations": _find_value(lines, "peak_activations", cached=True),
    }


def _timing_measurements(
    lines: list[Measurement], config: BenchmarkConfig
) -> dict[str, float | int]:
    prompt, largest = config.prompt_tokens, max(config.batch_sizes)
    steps = _find_line(lines, "tpot", prompt_tokens=prompt, cached=True)
    p50, p95, p99 = (quantile.value * 1000 for quantile in steps.quantiles)
    uncached = _find_value(lines, "tpot", prompt_tokens=prompt, cached=False)
    return {
        "ttft_ms": _find_value(lines, "ttft", prompt_tokens=prompt) * 1000,
        "tpot_ms_p50": p50,
        "tpot_ms_p95": p95,
        "tpot_ms_p99": p99,
        "tpot_ms_uncached_p50": uncached * 1000,
        "tokens_per_second": _find_value(lines, "tokens_per_second", batch_size=largest),
    }


def _reuse_measurements(lines: list[Measurement]) -> dict[str, float | int]:
    """Return the metrics of the measure ``conversations``; none if it was not taken."""
    found: dict[str, float | int] = {}
    for line in lines:
        if line.part != "conversations" or line.value is None:
            continue
        if line.metric in _REUSE_METRICS:
            name = f"reuse_{line.metric.removeprefix('reuse_')}"
            is_time = line.unit == "s"
            found[f"{name}_ms" if is_time else name] = line.value * (1000 if is_time else 1)
        elif line.metric == "turn_hit_rate" and (line.turn or 0) <= MAX_REUSE_TURNS:
            found[f"reuse_hit_rate_turn{line.turn}"] = line.value
    return found


_REUSE_METRICS = frozenset({
    "hit_rate", "hit_rate_exact", "flops_saved", "warm_ttft", "cold_ttft", "reuse_gap", "reuse_kl",
    "reuse_top_changed", "conversation_bytes", "conversations", "bytes_held", "evictions",
    "requests",
})  # fmt: skip


def _find_line(lines: list[Measurement], metric: str, **fields: object) -> Measurement:
    return next(
        candidate
        for candidate in lines
        if candidate.metric == metric
        and candidate.value is not None
        and all(getattr(candidate, name) == value for name, value in fields.items())
    )


def _find_value(lines: list[Measurement], metric: str, **fields: object) -> float | int:
    return _find_line(lines, metric, **fields).value or 0
