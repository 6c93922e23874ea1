"""The same layouts at other model sizes, contexts and batches: exact bytes, predicted times."""

from collections.abc import Iterator

from kvlab.benchmark.measurement import Measurement, TableLayout
from kvlab.benchmark.measures.decode_roofline import roofline_points
from kvlab.benchmark.session import Session, Variant
from kvlab.layout import RescaleError
from kvlab.layout.extrapolation import EXTRAPOLATION_PRESETS, Extrapolation, extrapolate
from kvlab.spec.experiment import ServedModel

TABLES = (
    TableLayout("the same layouts elsewhere", ("against", "context_length", "batch_size"), {
        "projected_kv_stored": "KV stored", "projected_kv_read": "KV read/token",
        "projected_weights": "weights", "projected_step": "step",
    }),
)  # fmt: skip


def measure(session: Session) -> Iterator[Measurement]:
    """Yield every variant at every size; times over the range of efficiencies measured here."""
    efficiencies = [point.efficiency for point in roofline_points(session)]
    worst, best = min(efficiencies), max(efficiencies)
    for variant in session.variants:
        served = ServedModel(name=variant.name, model=variant.model.config, serving=variant.serving)
        for size in EXTRAPOLATION_PRESETS:
            try:
                extrapolations = list(extrapolate(served, size, session.peaks(variant.dtype)))
            except RescaleError as error:
                session.on_notice(f"projection of {variant.name} to {size} is left out: {error}")
                continue
            for extrapolation in extrapolations:
                yield from _projection_lines(session, variant, extrapolation, worst, best)


def _projection_lines(
    session: Session, variant: Variant, extrapolation: Extrapolation, worst: float, best: float
) -> Iterator[Measurement]:
    fields = {
        "batch_size": extrapolation.batch_size,
        "context_length": extrapolation.context_length,
        "against": extrapolation.size,
        "cached": True,
    }
    exact = {
        "projected_kv_stored": extrapolation.kv_bytes,
        "projected_kv_read": extrapolation.cost.kv_read_bytes,
        "projected_weights": extrapolation.weight_bytes,
    }
    for metric, count in exact.items():
        yield session.make_line("projection", metric, variant, count, "bytes", exact=True, **fields)
    geometric_mean = (worst * best) ** 0.5
    yield session.make_line(
        "projection",
        "projected_step",
        variant,
        extrapolation.seconds / geometric_mean,
        "s",
        low=extrapolation.seconds / best,
        high=extrapolation.seconds / worst,
        verdict=extrapolation.bound,
        note=f"at {worst:.0%} to {best:.0%} of the roofline, as measured here; as if it had"
        " the memory for it",
        **fields,
    )
