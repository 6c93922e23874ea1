"""Time to first token by prompt length; time per token by context, with and without a cache."""

from collections.abc import Iterator, Sequence

from kvlab.benchmark.measurement import Measurement, Metrics, TableLayout, find_line, find_value
from kvlab.benchmark.session import Session
from kvlab.spec.benchmark_config import BenchmarkConfig

TABLES = (
    TableLayout("latency at batch 1", {"prompt_tokens": "prompt"}, {
        "ttft": "first token", "ttft:p95": "p95", "tpot": "a token", "tpot:p95": "p95",
        "tpot:p99": "p99", "tpot:uncached": "no cache",
        "tpot_ratio": "of the first", "step_preparation": "to prepare a step",
    }),
)  # fmt: skip


def measure(session: Session) -> Iterator[Measurement]:
    """Yield times at batch 1 by prompt length, then the comparisons with the first variant."""
    new = session.settings.new_tokens
    for length, timings in session.latencies.items():
        run = {"batch_size": 1, "prompt_tokens": length, "new_tokens": new}
        for variant in session.variants:
            slots = timings.slots[variant.name]
            for series, metric, context, counted in (
                ("first", "ttft", length, {}),
                ("steps", "tpot", length + new, slots),
                ("uncached", "tpot", length + (new + 1) // 2, {}),
            ):
                samples = timings.samples[variant.name, series]
                yield session.make_line(
                    "latency", metric, variant, samples.median, "s", **run, context_length=context,
                    cached=series != "uncached", quantiles=samples.quantiles(), **counted,
                    **session.reliability(timings, samples, variant),
                )  # fmt: skip
        yield from session.preparation_lines("latency", timings, **run, cached=True)
        yield from session.compare_variants(
            "latency", "tpot_ratio", "steps", timings, **run, context_length=length + new,
            cached=True,
        )  # fmt: skip


def metrics(lines: Sequence[Measurement], config: BenchmarkConfig) -> Metrics:
    """Return what a trial records of its lines, of those at the benchmark's prompt."""
    prompt = config.prompt_tokens
    steps = find_line(lines, "tpot", prompt_tokens=prompt, cached=True)
    p50, p95, p99 = (quantile.value * 1000 for quantile in steps.quantiles)
    uncached = find_value(lines, "tpot", prompt_tokens=prompt, cached=False)
    return {
        "ttft_ms": find_value(lines, "ttft", prompt_tokens=prompt) * 1000,
        "tpot_ms_p50": p50,
        "tpot_ms_p95": p95,
        "tpot_ms_p99": p99,
        "tpot_ms_uncached_p50": uncached * 1000,
    }
