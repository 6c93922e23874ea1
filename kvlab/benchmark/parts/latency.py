"""Time to first token against prompt length; time per token against context, with and without."""

from collections.abc import Iterator

from kvlab.benchmark.interleave import Timed
from kvlab.benchmark.measurement import Measurement, PartName
from kvlab.benchmark.samples import compare
from kvlab.benchmark.session import Session, Variant

SERIES = {"first": "ttft", "steps": "tpot", "again": "tpot"}


def measure(session: Session) -> Iterator[Measurement]:
    """Times at batch 1, by prompt length, then what the variants differ from the first in."""
    for length, timed in session.latencies.items():
        for variant in session.variants:
            yield from _times(session, variant, length, timed)
        for variant in session.variants[1:]:
            yield from comparison(session, "latency", "steps", variant, timed, length, 1)


def _times(
    session: Session, variant: Variant, length: int, timed: Timed[str]
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


def comparison(
    session: Session,
    part: PartName,
    series: str,
    variant: Variant,
    timed: Timed[str],
    length: int,
    batch: int,
) -> Iterator[Measurement]:
    """How long a variant takes as a multiple of the first; nothing after too few rounds."""
    base = session.variants[0]
    found = compare(timed.samples[variant.name, series], timed.samples[base.name, series])
    if found is None:
        return
    yield session.line(
        part,
        "tpot_ratio",
        variant,
        found.ratio,
        "",
        against=base.name,
        low=found.low,
        high=found.high,
        verdict=found.verdict,
        batch_size=batch,
        prompt_tokens=length,
        new_tokens=session.settings.new_tokens,
        context_length=length + session.settings.new_tokens,
        cached=True,
    )
