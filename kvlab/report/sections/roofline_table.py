"""Roofline: decode steps against the device's measured peaks, and where a layout pays off."""

from typing import Any

from kvlab.analysis.study import Study
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
from kvlab.report.table_columns import size_cell, size_column
from kvlab.spec.experiment import Experiment

Step = tuple[str, Any, Any]
"""Variant, batch size and context length of a decode step."""


def report_roofline(study: Study) -> Section | None:
    """Report decode steps of trials that measured the roofline (``benchmark.roofline: true``)."""
    lines, keys = benchmark_lines(study, MAX_VARIANTS)
    figure = roofline_figure(lines, keys)
    if figure is None:
        return None
    steps: dict[Step, dict[str, dict[str, Any]]] = {}
    for line in lines:
        if line["part"] == "roofline" and line.get("batch_size"):
            step = (line["variant"], line["batch_size"], line["context_length"])
            steps.setdefault(step, {})[line["metric"]] = line
    columns = (
        Column("cell"),
        Column("batch", True),
        Column("context", True),
        Column("GFLOPs", True, "10^9 floating-point operations"),
        size_column("weights"),
        size_column("K/V read"),
        Column("predicted (ms)", True),
        Column("measured (ms)", True),
        Column("MBU", True, "weights and K/V read each second, of the bandwidth", ("MBU (%)",)),
        Column("MFU", True, "FLOPs each second, of the matrix rate", ("MFU (%)",)),
        Column("bound by"),
    )
    rows = tuple(_row(step, step_lines, keys) for step, step_lines in steps.items())
    contents: list[Content] = [paragraph(_describe_peaks(lines))]
    contents.append(Table("roofline", "One decode step of the whole batch.", columns, rows))
    break_even = break_even_table(study, lines, keys)
    if break_even is not None:
        contents.append(break_even)
    contents.append(Figure(figure.name, figure.caption, figure.alt, figure.plot))
    return Section("Roofline", tuple(contents), not study.is_untrained)


def _describe_peaks(lines: list[dict[str, Any]]) -> str:
    peaks: dict[str, dict[str, Any]] = {}
    for line in lines:
        if line["metric"] in ("bandwidth", "product_bandwidth", "matrix_rate"):
            peaks.setdefault(line["metric"], line)
    name = peaks["bandwidth"].get("note", "").removeprefix("measured on ")
    rates = {metric: format_significant(line["value"] / 1e9) for metric, line in peaks.items()}
    products = low = ""
    if "product_bandwidth" in rates:
        rate = rates["product_bandwidth"]
        products = f" {rate} GB/s as one-row products read a large layer's weights,"
        low = peaks["product_bandwidth"].get("note", "").partition("; ")[2]
    return (
        f"Ceilings of {name}: {rates['bandwidth']} GB/s from memory,{products}"
        f" {rates['matrix_rate']} GFLOP/s in matrix products. A step takes the longer of moving its"
        " bytes and doing its arithmetic; a model that fits the processor's caches may beat the"
        f" first.{f' One-row products: {low}.' if low else ''}"
    )


def _row(step: Step, lines: dict[str, dict[str, Any]], keys: dict[str, str]) -> Row:
    variant, batch, context = step

    def number(metric: str, unit: float) -> Cell:
        if metric not in lines:
            return EMPTY_CELL
        value = lines[metric]["value"] / unit
        return cell(format_significant(value), value)

    def size(metric: str) -> Cell:
        return size_cell(round(lines[metric]["value"])) if metric in lines else EMPTY_CELL

    def share(metric: str) -> Cell:
        return cell(format_percent(lines[metric]["value"]), 100 * lines[metric]["value"])

    return Row(
        (
            cell(variant),
            cell(f"{batch:,}", batch),
            cell(f"{context:,}", context),
            number("step_flops", 1e9),
            size("step_weight_bytes"),
            size("step_kv_read_bytes"),
            number("step_predicted", 1e-3),
            number("step_measured", 1e-3),
            share("mbu"),
            share("mfu"),
            cell(str(lines["step_predicted"].get("verdict"))),
        ),
        keys.get(variant, ""),
    )


_BREAK_EVEN_CAPTION = (
    "Where a layout starts to pay by the roofline: from here on a step takes at most nine tenths"
    " of the baseline's. Never: not up to 2^20."
)


def break_even_table(
    study: Study, lines: list[dict[str, Any]], keys: dict[str, str]
) -> Table | None:
    """Return the context and the batch from which each layout is faster than the baseline's.

    Args:
        study: The study.
        lines: Benchmark lines, from `benchmark_lines`.
        keys: The cells' keys by label, from `benchmark_lines`.
    """
    peaks, base = measured_peaks(lines), cell_experiment(study, study.baseline)
    if peaks is None or base is None:
        return None
    rows = []
    for levels in study.cells:
        own = cell_experiment(study, levels)
        if levels != study.baseline and study.cell_key(levels) in keys.values() and own is not None:
            cells = (cell(study.label(levels)), *_break_even_cells(own, base, peaks))
            rows.append(Row(cells, study.cell_key(levels)))
    heads = ("context at batch 1 (tokens)", "batch at the block size (sequences)")
    columns = (Column("cell"), *(Column(head, True, csv=(head,)) for head in heads))
    return Table("break-even", _BREAK_EVEN_CAPTION, columns, tuple(rows)) if rows else None


def _break_even_cells(own: Experiment, base: Experiment, peaks: DevicePeaks) -> tuple[Cell, Cell]:
    pair = (own.model, own.serving), (base.model, base.serving)
    context = find_break_even(*pair, peaks, batch_size=1)
    batch = find_break_even(*pair, peaks, context_length=own.model.block_size)
    return _break_even_cell(context), _break_even_cell(batch)


def _break_even_cell(value: int | None) -> Cell:
    if value is None:
        return cell("never", MAX_BREAK_EVEN + 1, csv=(None,))  # sorts last
    return cell(f"{value:,}", value)
