"""Measured decode steps beside the time that the device's peak rates allow."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.benchmark.interleaving import InterleavedTimings
from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.session import Session, Variant
from kvlab.layout.roofline_model import DevicePeaks, StepCost, decode_step_cost, find_break_even

TABLES = (
    TableLayout("ceilings", (), {
        "bandwidth": "bytes/s", "product_bandwidth": "in products", "matrix_rate": "FLOP/s",
    }),
    TableLayout("a decode step beside the roofline", ("batch_size", "context_length"), {
        "step_flops": "FLOPs", "step_weight_bytes": "weights",
        "step_kv_read_bytes": "K/V read", "step_kv_written_bytes": "written",
        "step_predicted": "predicted", "step_measured": "measured", "mbu": "MBU", "mfu": "MFU",
    }),
    TableLayout("where a layout saves a tenth of the first's step", (), {
        "break_even_context": "context, batch 1", "break_even_batch": "batch, block size",
    }),
)  # fmt: skip

FASTER_THAN_PEAKS = (
    "faster than the ceilings: the model fits the caches, or the machine was busy when they were"
    " measured (kvlab bench --remeasure)"
)


@dataclass(frozen=True)
class RooflinePoint:
    """One variant's decode step at one batch size and prompt length, measured and predicted."""

    variant: Variant
    batch: int
    length: int
    cost: StepCost
    predicted: float
    timings: InterleavedTimings[str]

    @property
    def seconds(self) -> float:
        return self.timings.samples[self.variant.name, "steps"].median

    @property
    def efficiency(self) -> float:
        """The predicted over the measured time; 1 is the roofline itself."""
        return self.predicted / self.seconds


def measure(session: Session) -> Iterator[Measurement]:
    """Yield the peaks, each step's cost and times, and where a variant breaks even."""
    points = roofline_points(session)
    for variant in {v.dtype: v for v in session.variants}.values():
        peaks = session.peaks(variant.dtype)
        for metric, value, unit in (
            ("bandwidth", peaks.bandwidth, "bytes/s"),
            ("product_bandwidth", peaks.product_bandwidth, "bytes/s"),
            ("matrix_rate", peaks.flops, "FLOP/s"),
        ):
            notes = [f"measured on {peaks.name}", peaks.disturbance]
            if metric == "product_bandwidth" and (low := _low_product_note(peaks)):
                notes.append(low)
                session.on_notice(f"one-row products reach {low}")
            note = "; ".join(filter(None, notes))
            noisy = bool(peaks.disturbance) or None
            yield session.make_line(
                "roofline", metric, variant, value, unit, note=note, noisy=noisy
            )
    for point in points:
        yield from _point_lines(session, point)
    for variant in session.variants[1:]:
        yield from _break_even_lines(session, variant)


MIN_PRODUCT_SHARE = 0.7
"""Share of the bandwidth that one-row products reach where nothing is wrong."""


def _low_product_note(peaks: DevicePeaks) -> str:
    """Return why a decode step cannot be as fast as the bandwidth allows; empty if it can."""
    share = (peaks.product_bandwidth or peaks.bandwidth) / peaks.bandwidth
    if share >= MIN_PRODUCT_SHARE:
        return ""
    text = f"{share:.0%} of the bandwidth: this library's products of one row in {peaks.dtype}"
    return f"{text} do not read weights faster, so no step of batch 1 does"


def roofline_points(session: Session) -> list[RooflinePoint]:
    """Return every step that latency (by prompt) and throughput (by batch) time."""
    settings = session.settings
    measured = {(1, length): timings for length, timings in session.latencies.items()}
    for batch, timings in session.throughputs.items():
        measured[batch, settings.prompt_tokens] = timings
    points = []
    for (batch, length), timings in measured.items():
        context = length + (settings.new_tokens + 1) // 2
        for variant in session.variants:
            cost = decode_step_cost(
                variant.model.config, variant.serving, batch, context, variant.dtype
            )
            predicted = cost.seconds(session.peaks(variant.dtype))
            points.append(RooflinePoint(variant, batch, length, cost, predicted, timings))
    return points


def _point_lines(session: Session, point: RooflinePoint) -> Iterator[Measurement]:
    new, cost = session.settings.new_tokens, point.cost
    peaks = session.peaks(point.variant.dtype)
    fields: dict[str, Any] = {
        "batch_size": point.batch,
        "prompt_tokens": point.length,
        "new_tokens": new,
        "context_length": point.length + (new + 1) // 2,
        "cached": True,
    }
    exact = {
        "step_flops": (cost.flops, "FLOPs"),
        "step_weight_bytes": (cost.weight_bytes, "bytes"),
        "step_kv_read_bytes": (cost.kv_read_bytes, "bytes"),
        "step_kv_written_bytes": (cost.kv_written_bytes, "bytes"),
    }
    for metric, (count, unit) in exact.items():
        yield session.make_line(
            "roofline", metric, point.variant, count, unit, exact=True, **fields
        )
    samples = point.timings.samples[point.variant.name, "steps"]
    reliability = session.reliability(point.timings, samples, point.variant)
    if point.efficiency > 1:
        notes = filter(None, [FASTER_THAN_PEAKS, reliability["note"]])
        reliability |= {"noisy": True, "note": "; ".join(notes)}
    bound = {"verdict": cost.bound(peaks)}
    for metric, value, unit, extra_fields in (
        ("step_predicted", point.predicted, "s", bound),
        ("step_measured", point.seconds, "s", reliability),
        ("efficiency", point.efficiency, "", reliability),
        ("mbu", cost.mbu(point.seconds, peaks), "", reliability),
        ("mfu", cost.mfu(point.seconds, peaks), "", reliability),
    ):
        yield session.make_line(
            "roofline", metric, point.variant, value, unit, **fields, **extra_fields
        )


def _break_even_lines(session: Session, variant: Variant) -> Iterator[Measurement]:
    """Yield where a variant's step is a tenth faster than the first one's, by the roofline.

    This is the context at batch 1, and the batch at the block size.
    """
    base = session.variants[0]
    if base.dtype != variant.dtype:
        return
    block = variant.model.config.block_size
    peaks = session.peaks(variant.dtype)
    shape, base_shape = ((v.model.config, v.serving) for v in (variant, base))
    context = find_break_even(shape, base_shape, peaks, batch_size=1)
    batch = find_break_even(shape, base_shape, peaks, context_length=block)
    for metric, value, unit, fields in (
        ("break_even_context", context, "tokens", {"batch_size": 1}),
        ("break_even_batch", batch, "sequences", {"context_length": block}),
    ):
        note = "by the roofline, never saves a tenth of the time of a step"
        if value:
            note = "by the roofline, saves a tenth of the time of a step from here on"
        yield session.make_line(
            "roofline", metric, variant, value, unit, against=base.name, note=note, **fields
        )
