"""The benchmark stage of a trial."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
from numpy.typing import NDArray

from kvlab.benchmark.measurement import Measurement, Metrics, StopRule
from kvlab.benchmark.session import BenchmarkSettings, Session, Variant
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

    measurements: Metrics
    lines: list[Measurement]
    is_disturbed: bool = False


def benchmark(
    model: GPT,
    experiment: Experiment,
    *,
    device: str | torch.device = "cpu",
    on_progress: OnProgress = lambda _: None,
    tokens: Sequence[int] = (),
    held_out: Sequence[int] | NDArray[Any] = (),
) -> BenchmarkResult:
    """Measure memory and speed of decoding.

    KV bytes are at batch 1 and the block size, peaks and latencies at batch 1 and the
    benchmark's lengths, ``tokens_per_second`` at the largest of its batch sizes. Timings are
    meaningful only if nothing else runs on the device; the lines state whether something did.

    Args:
        on_progress: gets ``stage`` and ``note`` after every turn. An exception that it raises
            ends the benchmark.
        tokens: token ids of the trial's own text for the measure ``task``, which needs over 256.
        held_out: token ids of its held-out text.

    Raises:
        DataError: a text is too short for what is asked of it.
        MeasurementError: byte counts that must agree do not.
    """
    config = experiment.benchmark
    variant = Variant(experiment.name, model.to(device).eval(), experiment.serving)

    def report(note: str) -> None:
        on_progress({"stage": "benchmark", "note": note})

    settings = replace(_settings(config, tokens), held_out=held_out)
    session = Session([variant], settings, report, on_notice=report)
    return _measure(session, _select_measures(config), config)[variant.name]


def time_together(
    variants: list[Variant],
    config: BenchmarkConfig,
    *,
    on_turn: Callable[[], None],
    tokens: Sequence[int],
) -> tuple[dict[str, BenchmarkResult], str]:
    """Take the times of several variants in one session, where every round runs each once.

    Args:
        variants: on one device, in evaluation mode, with names of their own.
        config: what is measured; that of every variant.
        on_turn: called after every turn. An exception that it raises ends the session.
        tokens: see `benchmark`.

    Returns:
        What was measured of each variant, by its name, and what else used the machine meanwhile.
    """
    settings = _settings(config, tokens, len(variants))
    session = Session(variants, settings, lambda _note: on_turn())
    timed = [name for name in _select_measures(config) if MEASURES[name].is_timed]
    return _measure(session, timed, config), session.disturbance


def _measure(
    session: Session, names: list[str], config: BenchmarkConfig
) -> dict[str, BenchmarkResult]:
    """Return what some measures find of each variant, by its name."""
    lines: dict[str, list[Measurement]] = {variant.name: [] for variant in session.variants}
    measurements: dict[str, Metrics] = {name: {} for name in lines}
    for module in (import_module(MEASURES[name].module) for name in names):
        found = list(module.measure(session))
        for name, all_own in lines.items():
            # ratios of trials are those of their own numbers
            own = [line for line in found if line.variant == name and line.against is None]
            if hasattr(module, "metrics"):
                measurements[name] |= module.metrics(own, config)
            all_own += own
    is_disturbed = bool(session.disturbance)
    return {name: BenchmarkResult(measurements[name], lines[name], is_disturbed) for name in lines}


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
        settles_comparisons=False,
        options={k: getattr(config, e.memory_key or k, None) for k, e in MEASURES.items()},
    )


def _select_measures(config: BenchmarkConfig) -> list[str]:
    """Return the measures of every trial, those that `parts` names, and those whose key is set."""
    names = [*list_measures("always"), *(n for n in list_measures("parts") if n in config.parts)]
    return [*names, *(name for name in list_measures("key") if getattr(config, name))]
