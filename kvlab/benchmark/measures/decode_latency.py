"""Time to first token by prompt length; time per token by context, with and without a cache."""

from collections.abc import Iterator

from kvlab.benchmark.interleaving import InterleavedTimings
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session, Variant

TABLES = (
    TableLayout("latency at batch 1", ("prompt_tokens",), {
        "ttft": "first token", "ttft:p95": "p95", "tpot": "a token", "tpot:p95": "p95",
        "tpot:p99": "p99", "tpot:uncached": "no cache",
        "tpot_ratio": "of the first", "step_preparation": "to prepare a step",
    }),
)  # fmt: skip

METRICS = {"first": "ttft", "steps": "tpot", "uncached": "tpot"}
"""Series of `Session.latencies` -> metric."""


def measure(session: Session) -> Iterator[Measurement]:
    """Yield times at batch 1 by prompt length, then the comparisons with the first variant."""
    new = session.settings.new_tokens
    for length, timings in session.latencies.items():
        for variant in session.variants:
            yield from _latency_lines(session, variant, length, timings)
        yield from session.preparation_lines(
            "latency", 1, length, batch_size=1, prompt_tokens=length, new_tokens=new, cached=True
        )
        yield from session.compare_variants(
            "latency", "tpot_ratio", "steps", timings, batch_size=1, prompt_tokens=length,
            new_tokens=new, context_length=length + new, cached=True,
        )  # fmt: skip


def _latency_lines(
    session: Session, variant: Variant, length: int, timings: InterleavedTimings[str]
) -> Iterator[Measurement]:
    new = session.settings.new_tokens
    contexts = {"first": length, "steps": length + new, "uncached": length + (new + 1) // 2}
    for series, metric in METRICS.items():
        samples = timings.samples[variant.name, series]
        slots = session.slots.get((variant.name, 1, length), {}) if series == "steps" else {}
        yield session.make_line(
            "latency",
            metric,
            variant,
            samples.median,
            "s",
            batch_size=1,
            prompt_tokens=length,
            new_tokens=new,
            context_length=contexts[series],
            cached=series != "uncached",
            quantiles=samples.quantiles(),
            **slots,
            **session.reliability(timings, samples, variant),
        )
