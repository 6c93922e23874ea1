"""Measured decode steps beside the time that the device's peak rates allow."""

from collections.abc import Iterator
from typing import Any

from kvlab.benchmark.interleaving import InterleavedTimings
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session, Variant
from kvlab.layout.roofline_model import decode_step_cost

TABLES = (
    TableLayout("ceilings", {}, {
        "bandwidth": "bytes/s", "product_bandwidth": "in products", "matrix_rate": "FLOP/s",
    }),
    TableLayout("a decode step beside the roofline", {
        "batch_size": "batch", "context_length": "context",
    }, {
        "step_flops": "FLOPs", "step_weight_bytes": "weights",
        "step_kv_read_bytes": "K/V read", "step_kv_written_bytes": "written",
        "step_predicted": "predicted", "step_measured": "measured", "mbu": "MBU", "mfu": "MFU",
    }, ("mbu", "mfu")),
)  # fmt: skip

FASTER_THAN_PEAKS = (
    "faster than the ceilings: the model fits the caches, or the machine was busy when they were"
    " measured (kvlab bench --remeasure)"
)


MIN_PRODUCT_SHARE = 0.7
"""Share of the bandwidth that one-row products reach where nothing is wrong."""


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the peaks, and each step's cost and times.

    The steps are those that latency (by prompt) and throughput (by batch) time.
    """
    settings = session.settings
    timed = {(1, length): timings for length, timings in session.latencies.items()}
    for batch, timings in session.throughputs.items():
        timed[batch, settings.prompt_tokens] = timings
    for variant in {v.dtype: v for v in session.variants}.values():
        yield from _peak_lines(session, variant)
    for (batch, length), timings in timed.items():
        for variant in session.variants:
            yield from _step_lines(session, variant, batch, length, timings)


def _peak_lines(session: Session, variant: Variant) -> Iterator[Measurement]:
    """Yield the peaks of the device, and why a step cannot be as fast as the bandwidth allows."""
    peaks = session.peaks(variant.dtype)
    for metric, value, unit in (
        ("bandwidth", peaks.bandwidth, "bytes/s"),
        ("product_bandwidth", peaks.product_bandwidth, "bytes/s"),
        ("matrix_rate", peaks.flops, "FLOP/s"),
    ):
        notes = [f"measured on {peaks.name}", peaks.disturbance]
        share = (peaks.product_bandwidth or peaks.bandwidth) / peaks.bandwidth
        if metric == "product_bandwidth" and share < MIN_PRODUCT_SHARE:
            notes.append(
                f"{share:.0%} of the bandwidth: this library's products of one row in"
                f" {peaks.dtype} do not read weights faster, so no step of batch 1 does"
            )
            session.on_notice(f"one-row products reach {notes[-1]}")
        note, noisy = "; ".join(filter(None, notes)), bool(peaks.disturbance) or None
        yield session.make_line("roofline", metric, variant, value, unit, note=note, noisy=noisy)


def _step_lines(
    session: Session, variant: Variant, batch: int, length: int, timings: InterleavedTimings
) -> Iterator[Measurement]:
    """Yield a decode step as it is measured, and as the peaks predict it."""
    new, peaks = session.settings.new_tokens, session.peaks(variant.dtype)
    context = length + (new + 1) // 2
    cost = decode_step_cost(variant.model.config, variant.serving, batch, context, variant.dtype)
    samples = timings.samples[variant.name, "steps"]
    seconds, predicted = samples.median, cost.seconds(peaks)
    reliability = session.reliability(timings, samples, variant)
    if predicted > seconds:
        notes = filter(None, [FASTER_THAN_PEAKS, reliability["note"]])
        reliability |= {"noisy": True, "note": "; ".join(notes)}
    exact: dict[str, Any] = {"exact": True}
    for metric, value, unit, fields in (
        ("step_flops", cost.flops, "FLOPs", exact),
        ("step_weight_bytes", cost.weight_bytes, "bytes", exact),
        ("step_kv_read_bytes", cost.kv_read_bytes, "bytes", exact),
        ("step_kv_written_bytes", cost.kv_written_bytes, "bytes", exact),
        ("step_predicted", predicted, "s", {"verdict": cost.bound(peaks)}),
        ("step_measured", seconds, "s", reliability),
        ("efficiency", predicted / seconds, "", reliability),
        ("mbu", cost.mbu(seconds, peaks), "", reliability),
        ("mfu", cost.mfu(seconds, peaks), "", reliability),
    ):
        yield session.make_line(
            "roofline", metric, variant, value, unit, batch_size=batch, prompt_tokens=length,
            new_tokens=new, context_length=context, cached=True, **fields,
        )  # fmt: skip
