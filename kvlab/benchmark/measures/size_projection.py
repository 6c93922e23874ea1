"""The same layouts at other sizes, contexts and batches: bytes exact, times from the roofline."""

from collections.abc import Iterator

from kvlab.benchmark.measurement import Measurement
from kvlab.benchmark.measures.decode_roofline import roofline_points
from kvlab.benchmark.session import Session, Variant
from kvlab.layout import RescaleError
from kvlab.layout.extrapolation import EXTRAPOLATION_PRESETS, Extrapolation, extrapolate
from kvlab.spec.experiment import ServedModel


def measure(session: Session) -> Iterator[Measurement]:
    """Every variant on every size; times with the range of the efficiencies measured here."""
    measured = [point.efficiency for point in roofline_points(session)]
    for variant in session.variants:
        shape = ServedModel(name=variant.name, model=variant.model.config, serving=variant.serving)
        for size in EXTRAPOLATION_PRESETS:
            try:
                found = list(extrapolate(shape, size, session.ceilings(variant.dtype)))
            except RescaleError as error:
                session.say(f"projection of {variant.name} to {size} is left out: {error}")
                continue
            for one in found:
                yield from _projection_lines(session, variant, one, min(measured), max(measured))


def _projection_lines(
    session: Session, variant: Variant, one: Extrapolation, worst: float, best: float
) -> Iterator[Measurement]:
    place = {
        "batch_size": one.batch_size,
        "context_length": one.context_length,
        "against": one.size,
        "cached": True,
    }
    exact = {
        "projected_kv_stored": one.kv_bytes,
        "projected_kv_read": one.cost.kv_read_bytes,
        "projected_weights": one.weight_bytes,
    }
    for metric, count in exact.items():
        yield session.line("projection", metric, variant, count, "bytes", exact=True, **place)
    middle = (worst * best) ** 0.5
    yield session.line(
        "projection",
        "projected_step",
        variant,
        one.seconds / middle,
        "s",
        low=one.seconds / best,
        high=one.seconds / worst,
        verdict=one.bound,
        note=f"at {worst:.0%} to {best:.0%} of the roofline, as measured here; as if it had"
        " the memory for it",
        **place,
    )
