"""The cells' layouts at other sizes: bytes exact, times from the roofline as measured here."""

from kvlab.layout import RescaleError
from kvlab.layout.extrapolation import (
    BATCH_SIZES,
    CONTEXT_LENGTHS,
    EXTRAPOLATION_PRESETS,
    Extrapolation,
    extrapolate,
)
from kvlab.layout.roofline_model import DevicePeaks
from kvlab.report.benchmark_lines import benchmark_lines, cell_experiment, measured_peaks
from kvlab.report.benchmark_plots import MAX_VARIANTS
from kvlab.report.document import Cell, Column, Figure, Row, Section, Table, cell, paragraph
from kvlab.report.figures.plot import SERIES, Axis, Plot, Point, Points
from kvlab.report.formatting import format_percent, format_significant
from kvlab.report.study import Study
from kvlab.report.trial_rows import Levels
from kvlab.spec.experiment import ServedModel


def report_projection(study: Study) -> Section | None:
    """Shown if trials measured the roofline: its ceilings and efficiencies are used."""
    lines, keys = benchmark_lines(study, MAX_VARIANTS)
    ceilings = measured_peaks(lines)
    shares = [line["value"] for line in lines if line["metric"] == "efficiency"]
    if ceilings is None or not shares:
        return None
    found = {
        levels: _projected(study, levels, ceilings)
        for levels in study.cells
        if study.cell_key(levels) in keys.values()
    }
    rows = [_row(study, levels, one, shares) for levels, some in found.items() for one in some]
    if not rows:
        return None
    note = paragraph(
        f"The layouts in {ceilings.dtype} on other models, exact in bytes. Times are what"
        f" {ceilings.name} would take if it had the memory, at {format_percent(min(shares), 0)} to"
        f" {format_percent(max(shares), 0)} of the roofline, the efficiencies measured in this sweep."
        " Quality at those sizes is not projected.",
    )
    columns = (
        Column("cell"),
        Column("size"),
        Column("batch", True),
        Column("context", True),
        Column("KV stored (GB)", True),
        Column("KV read per token (GB)", True),
        Column("weights (GB)", True),
        Column("step, from (s)", True),
        Column("step, to (s)", True),
    )
    table = Table("projection", "Other sizes, contexts and batches.", columns, tuple(rows))
    return Section("Projection", (note, _figure(study, found), table))


def _figure(study: Study, found: dict[Levels, list[Extrapolation]]) -> Figure:
    """Stored K/V of every layout at every size, where most sequences are served."""
    batch, context = max(BATCH_SIZES), max(CONTEXT_LENGTHS)
    layers = []
    for number, (levels, some) in enumerate(found.items()):
        name, key = study.label(levels), study.cell_key(levels)
        points = tuple(
            Point(
                one.kv_bytes,
                EXTRAPOLATION_PRESETS.index(one.size),
                (name, one.size, f"K/V {_gigabytes(one.kv_bytes)}"),
                key,
            )
            for one in some
            if (one.batch_size, one.context_length) == (batch, context)
        )
        if points:
            layers.append(Points(name, points, SERIES[number % len(SERIES)]))
    weights = {one.size: one.weight_bytes for some in reversed(found.values()) for one in some}
    rings = tuple(
        Point(count, EXTRAPOLATION_PRESETS.index(size), (size, f"weights {_gigabytes(count)}"))
        for size, count in weights.items()
    )
    plot = Plot(
        Axis("bytes stored (logarithmic)", "bytes"),
        Axis("", "names", EXTRAPOLATION_PRESETS),
        (Points("weights of the first layout", rings, "muted", "ring"), *layers),
    )
    caption = f"Stored K/V at {batch} sequences of {context:,} tokens, against the weights."
    largest = "; ".join(
        f"{layer.name}: {_gigabytes(layer.points[-1].x)} at {EXTRAPOLATION_PRESETS[round(layer.points[-1].y)]}"
        for layer in layers
    )
    return Figure("projection", caption, f"{caption} {largest}.", plot)


def _gigabytes(count: float) -> str:
    return f"{format_significant(count / 1e9)} GB"


def _projected(study: Study, levels: Levels, ceilings: DevicePeaks) -> list[Extrapolation]:
    """Nothing where the layout means nothing at a size, as owners that name layers by number."""
    experiment = cell_experiment(study, levels)
    if experiment is None:
        return []
    shape = ServedModel(name=experiment.name, model=experiment.model, serving=experiment.serving)
    found: list[Extrapolation] = []
    for size in EXTRAPOLATION_PRESETS:
        try:
            found += extrapolate(shape, size, ceilings)
        except RescaleError:
            continue
    return found


def _row(study: Study, levels: Levels, one: Extrapolation, shares: list[float]) -> Row:
    def giga(count: float) -> Cell:
        return cell(format_significant(count / 1e9), count / 1e9)

    soonest, latest = one.seconds / max(shares), one.seconds / min(shares)
    return Row(
        (
            cell(study.label(levels)),
            cell(one.size),
            cell(f"{one.batch_size:,}", one.batch_size),
            cell(f"{one.context_length:,}", one.context_length),
            giga(one.kv_bytes),
            giga(one.cost.kv_read_bytes),
            giga(one.weight_bytes),
            cell(format_significant(soonest), soonest),
            cell(format_significant(latest), latest),
        ),
        study.cell_key(levels),
    )
