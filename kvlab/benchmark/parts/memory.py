"""Exact KV bytes, and the peak with and without a cache, split by what it holds."""

from collections.abc import Iterator
from dataclasses import fields
from functools import partial

from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.memory import Peak, kv_bytes, peaks
from kvlab.benchmark.session import Session, Variant


def measure(session: Session) -> Iterator[Measurement]:
    """KV bytes at batch 1 and the block size; peaks at batch 1 and the benchmark's lengths.

    Raises:
        MeasurementError: byte counts that must agree do not.
    """
    for variant in session.variants:
        yield from _exact(session, variant)
    for variant in session.variants:
        yield from _peaks(session, variant)


def _exact(session: Session, variant: Variant) -> Iterator[Measurement]:
    block = variant.model.config.block_size
    found = kv_bytes(variant.decoder, 1, block)
    counts = {
        "kv_formula": found.stored,
        "kv_storage": found.stored,
        "kv_read": found.read,
        "kv_requested": found.requested,
        "kv_allocated": found.allocated,
    }
    line = partial(session.line, "memory", batch_size=1, context_length=block, cached=True)
    for metric, count in counts.items():
        if count is not None:
            yield line(metric=metric, variant=variant, value=count, unit="bytes", exact=True)


def _peaks(session: Session, variant: Variant) -> Iterator[Measurement]:
    prompt, new = session.settings.prompt_tokens, session.settings.new_tokens
    decoder = variant.decoder
    decoder.decode(decoder.new_cache(1, prompt + new), new)
    for cached, peak in peaks(decoder, prompt, new, lambda: session.on_tick("peak")).items():
        line = partial(
            session.line,
            "memory",
            variant=variant,
            unit="bytes",
            batch_size=1,
            prompt_tokens=prompt,
            new_tokens=new,
            context_length=prompt + new,
            cached=cached,
        )
        yield line(metric="peak", value=peak.total)
        for part in fields(Peak):
            exact = part.name != "activations"
            yield line(metric=f"peak_{part.name}", value=getattr(peak, part.name), exact=exact)
