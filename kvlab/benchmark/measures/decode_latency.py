"""Time to first token against prompt length; time per token against context, with and without."""

from collections.abc import Iterator

from kvlab.benchmark.interleaving import InterleavedTimings
from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.session import Session, Variant, compare_variants

SERIES = {"first": "ttft", "steps": "tpot", "again": "tpot"}


def measure(session: Session) -> Iterator[Measurement]:
    """Times at batch 1, by prompt length, then what the variants differ from the first in."""
    for length, timed in session.latencies.items():
        for variant in session.variants:
            yield from _latency_lines(session, variant, length, timed)
        new = session.settings.new_tokens
        yield from compare_variants(
            session, "latency", "tpot_ratio", "steps", timed, batch_size=1, prompt_tokens=length,
            new_tokens=new, context_length=length + new, cached=True,
        )  # fmt: skip


def _latency_lines(
    session: Session, variant: Variant, length: int, timed: InterleavedTimings[str]
) -> Iterator[Measurement]:
    new = session.settings.new_tokens
    ends = {"first": length, "steps": length + new, "again": length + (new + 1) // 2}
    for series, metric in SERIES.items():
        samples = timed.samples[variant.name, series]
        yield session.line(
            "latency",
            metric,
            variant,
            samples.median,
            "s",
            batch_size=1,
            prompt_tokens=length,
            new_tokens=new,
            context_length=ends[series],
            cached=series != "again",
            quantiles=samples.quantiles(),
            **session.trust(timed, samples),
        )
