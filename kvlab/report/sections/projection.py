"""Projection: the cells' layouts at other model sizes, with exact bytes and roofline times."""

from contextlib import suppress

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
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
from kvlab.report.document import Column, Figure, Row, Section, Table, cell, paragraph
from kvlab.report.figures.plot import SERIES, Axis, Plot, Point, Points
from kvlab.report.formatting import format_binary_size, format_percent, format_significant
from kvlab.report.table_columns import size_cell, size_column
from kvlab.spec.experiment import ServedModel


def report_projection(study: Study) -> Section | None:
    """Extrapolate by the measured device peaks and efficiencies; needs the roofline benchmark."""
    lines, keys = benchmark_lines(study, MAX_VARIANTS)
    peaks = measured_peaks(lines)
    efficiencies = [line["value"] for line in lines if line["metric"] == "efficiency"]
    if peaks is None or not efficiencies:
        return None
    by_cell = {
        levels: _extrapolate_cell(study, levels, peaks)
        for levels in study.cells
        if study.cell_key(levels) in keys.values()
    }
    rows = [
        _row(study, levels, extrapolated, efficiencies)
        for levels, sizes in by_cell.items()
        for extrapolated in sizes
    ]
    if not rows:
        return None
    lowest, highest = (format_percent(f(efficiencies), 0) for f in (min, max))
    note = paragraph(
        f"The layouts in {peaks.dtype} on other models, exact in bytes. Times are what"
        f" {peaks.name} would take if it had the memory, at {lowest} to {highest} of the roofline,"
        " the efficiencies measured in this sweep. Quality at those sizes is not projected.",
    )
    columns = (
        Column("cell"),
        Column("size"),
        Column("batch", True),
        Column("context", True),
        size_column("K/V stored"),
        size_column("K/V read per token"),
        size_column("weights"),
        Column("step, from (s)", True),
        Column("step, to (s)", True),
    )
    table = Table("projection", "Other sizes, contexts and batches.", columns, tuple(rows))
    return Section("Projection", (note, _figure(study, by_cell), table), not study.is_untrained)


def _figure(study: Study, by_cell: dict[Levels, list[Extrapolation]]) -> Figure:
    """Plot the stored K/V of every layout at every size, at the largest batch and context."""
    batch, context = max(BATCH_SIZES), max(CONTEXT_LENGTHS)
    layers = []
    for number, (levels, sizes) in enumerate(by_cell.items()):
        name, key = study.label(levels), study.cell_key(levels)
        points = tuple(
            Point(
                extrapolated.kv_bytes,
                EXTRAPOLATION_PRESETS.index(extrapolated.size),
                (name, extrapolated.size, f"K/V {format_binary_size(extrapolated.kv_bytes)}"),
                key,
            )
            for extrapolated in sizes
            if (extrapolated.batch_size, extrapolated.context_length) == (batch, context)
        )
        if points:
            layers.append(Points(name, points, SERIES[number % len(SERIES)]))
    weights = {
        extrapolated.size: extrapolated.weight_bytes
        for sizes in reversed(by_cell.values())
        for extrapolated in sizes
    }
    weight_points = tuple(
        Point(
            count,
            EXTRAPOLATION_PRESETS.index(size),
            (size, f"weights {format_binary_size(count)}"),
        )
        for size, count in weights.items()
    )
    plot = Plot(
        Axis("bytes stored (logarithmic)", "bytes"),
        Axis("", "names", EXTRAPOLATION_PRESETS),
        (Points("weights of the first layout", weight_points, "muted", "ring"), *layers),
    )
    caption = f"Stored K/V at {batch} sequences of {context:,} tokens, against the weights."
    largest_points = ((layer.name, layer.points[-1]) for layer in layers)
    largest_sizes = "; ".join(
        f"{name}: {format_binary_size(point.x)} at {EXTRAPOLATION_PRESETS[round(point.y)]}"
        for name, point in largest_points
    )
    return Figure("projection", caption, f"{caption} {largest_sizes}.", plot)


def _extrapolate_cell(study: Study, levels: Levels, peaks: DevicePeaks) -> list[Extrapolation]:
    """Extrapolate a cell's layout to every size that it is defined for.

    Sharing owners that name layers by number, for example, have no meaning at another depth.
    """
    experiment = cell_experiment(study, levels)
    if experiment is None:
        return []
    shape = ServedModel(name=experiment.name, model=experiment.model, serving=experiment.serving)
    extrapolations: list[Extrapolation] = []
    for size in EXTRAPOLATION_PRESETS:
        with suppress(RescaleError):
            extrapolations += extrapolate(shape, size, peaks)
    return extrapolations


def _row(
    study: Study, levels: Levels, extrapolated: Extrapolation, efficiencies: list[float]
) -> Row:
    fastest = extrapolated.seconds / max(efficiencies)
    slowest = extrapolated.seconds / min(efficiencies)
    return Row(
        (
            cell(study.label(levels)),
            cell(extrapolated.size),
            cell(f"{extrapolated.batch_size:,}", extrapolated.batch_size),
            cell(f"{extrapolated.context_length:,}", extrapolated.context_length),
            size_cell(extrapolated.kv_bytes),
            size_cell(extrapolated.cost.kv_read_bytes),
            size_cell(extrapolated.weight_bytes),
            cell(format_significant(fastest), fastest),
            cell(format_significant(slowest), slowest),
        ),
        study.cell_key(levels),
    )
