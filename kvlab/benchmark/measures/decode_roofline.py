"""Measured decode steps beside the time that the device's ceilings allow."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvlab.benchmark.interleaving import InterleavedTimings
from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.session import Session, Variant
from kvlab.layout.roofline_model import StepCost, decode_step_cost, find_break_even

FASTER_THAN_PEAKS = (
    "faster than the ceilings: the model fits the caches, or the machine was busy before"
)


@dataclass(frozen=True)
class RooflinePoint:
    """One variant's step at one batch and prompt, measured and predicted."""

    variant: Variant
    batch: int
    length: int
    cost: StepCost
    predicted: float
    timed: InterleavedTimings[str]

    @property
    def seconds(self) -> float:
        return self.timed.samples[self.variant.name, "steps"].median

    @property
    def efficiency(self) -> float:
        """The predicted time over the measured: 1 is the roofline itself."""
        return self.predicted / self.seconds


def roofline_points(session: Session) -> list[RooflinePoint]:
    """Every step that latency (by prompt) and throughput (by batch) time.

    If one was faster than the ceilings allow, as where these were measured on a busy machine,
    they are measured once more. What is still faster has a model that fits the caches.
    """
    found = _predict_points(session)
    beaten = {point.variant.dtype for point in found if point.efficiency > 1}
    for dtype in beaten:
        session.raise_ceilings(dtype)
    return _predict_points(session) if beaten else found


def _predict_points(session: Session) -> list[RooflinePoint]:
    settings = session.settings
    measured = {(1, length): timed for length, timed in session.latencies.items()}
    for batch, timed in session.throughputs.items():
        measured[batch, settings.prompt_tokens] = timed
    found = []
    for (batch, length), timed in measured.items():
        middle = length + (settings.new_tokens + 1) // 2
        for variant in session.variants:
            config = variant.model.config
            cost = decode_step_cost(config, variant.serving, batch, middle, variant.dtype)
            predicted = cost.seconds(session.ceilings(variant.dtype))
            found.append(RooflinePoint(variant, batch, length, cost, predicted, timed))
    return found


def measure(session: Session) -> Iterator[Measurement]:
    """Ceilings; each step's FLOPs, bytes, predicted and measured time; where a variant pays."""
    measured = roofline_points(session)
    for variant in {each.dtype: each for each in session.variants}.values():
        found = session.ceilings(variant.dtype)
        named = {"note": f"measured on {found.name}"}
        yield session.line("roofline", "bandwidth", variant, found.bandwidth, "bytes/s", **named)
        products = found.product_bandwidth
        yield session.line("roofline", "product_bandwidth", variant, products, "bytes/s", **named)
        yield session.line("roofline", "matrix_rate", variant, found.flops, "FLOP/s", **named)
    for point in measured:
        yield from _point_lines(session, point)
    for variant in session.variants[1:]:
        yield from _break_even_lines(session, variant)


def _point_lines(session: Session, point: RooflinePoint) -> Iterator[Measurement]:
    new, cost = session.settings.new_tokens, point.cost
    ceilings = session.ceilings(point.variant.dtype)
    place: dict[str, Any] = {
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
        yield session.line("roofline", metric, point.variant, count, unit, exact=True, **place)
    samples = point.timed.samples[point.variant.name, "steps"]
    trust = session.trust(point.timed, samples)
    if point.efficiency > 1:
        trust |= {
            "noisy": True,
            "note": "; ".join(filter(None, [FASTER_THAN_PEAKS, trust["note"]])),
        }
    timed = {
        "step_predicted": (point.predicted, "s"),
        "step_measured": (point.seconds, "s"),
        "efficiency": (point.efficiency, ""),
        "mbu": (cost.mbu(point.seconds, ceilings), ""),
        "mfu": (cost.mfu(point.seconds, ceilings), ""),
    }
    verdict = {"verdict": cost.bound(ceilings)}
    for metric, (value, unit) in timed.items():
        more = verdict if metric == "step_predicted" else trust
        yield session.line("roofline", metric, point.variant, value, unit, **place, **more)


def _break_even_lines(session: Session, variant: Variant) -> Iterator[Measurement]:
    """Against the first variant: the context at batch 1, and the batch at the block size."""
    base = session.variants[0]
    if base.dtype != variant.dtype:
        return
    block = variant.model.config.block_size
    ceilings = session.ceilings(variant.dtype)
    mine, theirs = ((v.model.config, v.serving) for v in (variant, base))
    context = find_break_even(mine, theirs, ceilings, batch_size=1)
    batch = find_break_even(mine, theirs, ceilings, context_length=block)
    why = "by the roofline, saves a tenth of the time of a step from here on"
    none = "by the roofline, never saves a tenth of the time of a step"
    for metric, value, unit, place in (
        ("break_even_context", context, "tokens", {"batch_size": 1}),
        ("break_even_batch", batch, "sequences", {"context_length": block}),
    ):
        note = why if value else none
        yield session.line(
            "roofline", metric, variant, value, unit, against=base.name, note=note, **place
        )
