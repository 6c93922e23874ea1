"""Decode steps beside the time that the device's measured ceilings allow."""

from typing import Any

from kvlab.layout.roofline_model import MAX_BREAK_EVEN, DevicePeaks, find_break_even
from kvlab.report.benchmark_lines import benchmark_lines, cell_experiment, measured_peaks
from kvlab.report.benchmark_plots import MAX_VARIANTS, roofline_figure
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Figure,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import format_percent, format_significant
from kvlab.report.study import Study
from kvlab.spec.experiment import Experiment

Place = tuple[str, Any, Any]


def report_roofline(study: Study) -> Section | None:
    """Shown if trials measured it (``benchmark.roofline: true``)."""
    lines, keys = benchmark_lines(study, MAX_VARIANTS)
    figure = roofline_figure(lines, keys)
    if figure is None:
        return None
    places: dict[Place, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line["part"] == "roofline" and line.get("batch_size"):
            place = (line["variant"], line["batch_size"], line["context_length"])
            places.setdefault(place, {})[line["metric"]] = line
    columns = (
        Column("cell"),
        Column("batch", True),
        Column("context", True),
        Column("GFLOPs", True, "10^9 floating-point operations"),
        Column("weights (MB)", True),
        Column("K/V read (MB)", True),
        Column("predicted (ms)", True),
        Column("measured (ms)", True),
        Column("MBU", True, "weights and K/V read each second, of the bandwidth", ("MBU (%)",)),
        Column("MFU", True, "FLOPs each second, of the matrix rate", ("MFU (%)",)),
        Column("bound by"),
    )
    rows = tuple(_row(place, found, keys) for place, found in places.items())
    contents: list[Content] = [paragraph(_ceilings(lines))]
    contents.append(Table("roofline", "One decode step of the whole batch.", columns, rows))
    pays = break_even_table(study, lines, keys)
    if pays is not None:
        contents.append(pays)
    contents.append(Figure(figure.name, figure.caption, figure.alt, figure.plot))
    return Section("Roofline", tuple(contents))


def _ceilings(lines: list[dict[str, Any]]) -> str:
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["metric"] in ("bandwidth", "product_bandwidth", "matrix_rate"):
            found.setdefault(line["metric"], line)
    name = found["bandwidth"].get("note", "").removeprefix("measured on ")
    return (
        f"Ceilings of {name}: {format_significant(found['bandwidth']['value'] / 1e9)} GB/s from memory,"
        f"{_products(found)}"
        f" {format_significant(found['matrix_rate']['value'] / 1e9)} GFLOP/s in matrix products. A step"
        " takes the longer of moving its bytes and doing its arithmetic; a model that fits the"
        " processor's caches may beat the first."
    )


def _products(found: dict[str, dict[str, Any]]) -> str:
    if "product_bandwidth" not in found:
        return ""
    rate = format_significant(found["product_bandwidth"]["value"] / 1e9)
    return f" {rate} GB/s as one-row products read a large layer's weights,"


def _row(place: Place, found: dict[str, dict[str, Any]], keys: dict[str, str]) -> Row:
    variant, batch, context = place

    def number(metric: str, unit: float) -> Cell:
        if metric not in found:
            return EMPTY_CELL
        value = found[metric]["value"] / unit
        return cell(format_significant(value), value)

    def share(metric: str) -> Cell:
        return cell(format_percent(found[metric]["value"]), 100 * found[metric]["value"])

    return Row(
        (
            cell(variant),
            cell(f"{batch:,}", batch),
            cell(f"{context:,}", context),
            number("step_flops", 1e9),
            number("step_weight_bytes", 1e6),
            number("step_kv_read_bytes", 1e6),
            number("step_predicted", 1e-3),
            number("step_measured", 1e-3),
            share("mbu"),
            share("mfu"),
            cell(str(found["step_predicted"].get("verdict"))),
        ),
        keys.get(variant, ""),
    )


# From which context and which batch on a cell's layout pays against the baseline's.


_BREAK_EVEN_CAPTION = (
    "Where a layout starts to pay by the roofline: from here on a step takes at most nine tenths"
    " of the baseline's. Never: not up to 2^20."
)


def break_even_table(
    study: Study, lines: list[dict[str, Any]], keys: dict[str, str]
) -> Table | None:
    """A row a cell that has lines; None where there is nothing beside the baseline.

    Args:
        lines, keys: of `kvlab.report.benchmark_lines.benchmark_lines`.
    """
    ceilings, base = measured_peaks(lines), cell_experiment(study, study.baseline)
    if ceilings is None or base is None:
        return None
    rows = []
    for levels in study.cells:
        mine = cell_experiment(study, levels)
        if (
            levels != study.baseline
            and study.cell_key(levels) in keys.values()
            and mine is not None
        ):
            cells = (cell(study.label(levels)), *_break_even_cells(mine, base, ceilings))
            rows.append(Row(cells, study.cell_key(levels)))
    heads = ("context at batch 1 (tokens)", "batch at the block size (sequences)")
    columns = (Column("cell"), *(Column(head, True, csv=(head,)) for head in heads))
    return Table("break-even", _BREAK_EVEN_CAPTION, columns, tuple(rows)) if rows else None


def _break_even_cells(
    mine: Experiment, base: Experiment, ceilings: DevicePeaks
) -> tuple[Cell, Cell]:
    pair = (mine.model, mine.serving), (base.model, base.serving)
    context = find_break_even(*pair, ceilings, batch_size=1)
    batch = find_break_even(*pair, ceilings, context_length=mine.model.block_size)
    return _break_even_cell(context), _break_even_cell(batch)


def _break_even_cell(value: int | None) -> Cell:
    if value is None:
        return cell("never", MAX_BREAK_EVEN + 1, csv=(None,))  # sorts last
    return cell(f"{value:,}", value)
