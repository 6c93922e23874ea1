"""Decode steps beside the time that the device's measured ceilings allow."""

from typing import Any

from kvlab.report.benchmark_lines import benchmark_lines
from kvlab.report.benchmark_plots import MOST, roofline_figure
from kvlab.report.break_even import break_even_table
from kvlab.report.numbers import percent, significant
from kvlab.report.section import (
    EMPTY,
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
from kvlab.report.study import Study

Place = tuple[str, Any, Any]


def roofline(study: Study) -> Section | None:
    """Shown if trials measured it (``benchmark.roofline: true``)."""
    lines, keys = benchmark_lines(study, MOST)
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
        f"Ceilings of {name}: {significant(found['bandwidth']['value'] / 1e9)} GB/s from memory,"
        f"{_products(found)}"
        f" {significant(found['matrix_rate']['value'] / 1e9)} GFLOP/s in matrix products. A step"
        " takes the longer of moving its bytes and doing its arithmetic; a model that fits the"
        " processor's caches may beat the first."
    )


def _products(found: dict[str, dict[str, Any]]) -> str:
    if "product_bandwidth" not in found:
        return ""
    rate = significant(found["product_bandwidth"]["value"] / 1e9)
    return f" {rate} GB/s as one-row products read a large layer's weights,"


def _row(place: Place, found: dict[str, dict[str, Any]], keys: dict[str, str]) -> Row:
    variant, batch, context = place

    def number(metric: str, unit: float) -> Cell:
        if metric not in found:
            return EMPTY
        value = found[metric]["value"] / unit
        return cell(significant(value), value)

    def share(metric: str) -> Cell:
        return cell(percent(found[metric]["value"]), 100 * found[metric]["value"])

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
