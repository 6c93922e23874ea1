"""Lines of benchmarks and their figures: curves of latency and throughput, the roofline.

`kvlab bench --plots` draws them too, from the lines of one benchmark.
"""

import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.own_extensions import name_members
from kvlab.report import document as doc
from kvlab.report import texts
from kvlab.report.formatting import format_significant
from kvlab.spec.experiment import Experiment

Lines = Iterable[Mapping[str, Any]]
"""`kvlab.benchmark.measurement.Measurement` as plain data, possibly without its defaults."""

MAX_VARIANTS = len(doc.SERIES) - 1
"""Variants in one figure; the last colour is left for the dashed lines that all share."""


@dataclass(frozen=True)
class Curve:
    """A figure of one metric over one field of the lines; see ``page/curves.toml``."""

    name: str
    metric: str
    field: str
    x_title: str
    y_title: str
    caption: str
    scale: float = 1.0
    with_uncached: bool = False


_CURVES = files("kvlab.report").joinpath("page/curves.toml").read_text(encoding="utf-8")

CURVES = tuple(Curve(name, **facts) for name, facts in tomllib.loads(_CURVES).items())


def benchmark_figures(lines: Lines, keys: Mapping[str, str] | None = None) -> Iterator[doc.Figure]:
    """Yield the figures of `CURVES` that the lines have at least two points for.

    Args:
        keys: Variant -> key of the design's cell, for selection across a page.
    """
    lines, keys = list(lines), keys or {}
    for curve in CURVES:
        yield from _draw_curve(curve, lines, keys)


def _draw_curve(curve: Curve, lines: Lines, keys: Mapping[str, str]) -> Iterator[doc.Figure]:
    series: dict[tuple[str, bool], list[doc.Point]] = {}
    for line in lines:
        is_cached = bool(line.get("cached"))
        if line["metric"] != curve.metric or line.get("value") is None:
            continue
        if is_cached or curve.with_uncached:
            point = _curve_point(curve, line, keys)
            series.setdefault((line["variant"], is_cached), []).append(point)
    series = {key: points for key, points in series.items() if len(points) > 1}
    variants = list(dict.fromkeys(variant for variant, _ in series))[:MAX_VARIANTS]
    if not variants or (curve.with_uncached and all(is_cached for _, is_cached in series)):
        return
    layers = []
    for (variant, is_cached), points in series.items():
        if variant in variants:
            points.sort(key=lambda point: point.x)
            name = variant if is_cached else f"{variant}, no cache"
            role = doc.SERIES[variants.index(variant)]
            layers.append(doc.Line(name, tuple(points), role, doc.DASHES[not is_cached]))
    plot = doc.Plot(doc.Axis(curve.x_title), doc.Axis(curve.y_title), tuple(layers))
    yield doc.Figure(curve.name, curve.caption, f"{curve.caption} {name_ends(layers)}.", plot)


def name_ends(layers: Iterable[doc.Line], unit: str = "") -> str:
    """Return the first and the last value of every line, in words."""
    return "; ".join(
        f"{layer.name}: {format_significant(layer.points[0].y)}{unit}"
        f" to {format_significant(layer.points[-1].y)}{unit}"
        for layer in layers
    )


def _curve_point(curve: Curve, line: Mapping[str, Any], keys: Mapping[str, str]) -> doc.Point:
    value = line["value"] * curve.scale
    median = next((q for q in line.get("quantiles") or [] if q["q"] == 0.5), line)
    low, high = median.get("low"), median.get("high")
    y_range = None
    if low is not None and high is not None:
        y_range = low * curve.scale, high * curve.scale
    unit = "sequences" if curve.field == "batch_size" else "tokens"
    tip = [line["variant"], f"{line[curve.field]:,} {unit}"]
    tip.append(f"{curve.y_title}: {format_significant(value)}")
    if line.get("noisy"):
        tip.append(f"noisy: {line.get('note', '')}")
    key = keys.get(line["variant"], "")
    return doc.Point(line[curve.field], value, tuple(tip), key, y_range=y_range)


Step = tuple[str, int, int]
"""The variant, the batch and the context of a decode step."""


def group_steps(lines: Lines) -> dict[Step, dict[str, Mapping[str, Any]]]:
    """Return the lines of every decode step of the roofline, by their metric."""
    steps: dict[Step, dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        if line["part"] == "roofline" and line.get("batch_size"):
            step = (line["variant"], line["batch_size"], line["context_length"])
            steps.setdefault(step, {})[line["metric"]] = line
    return steps


def roofline_figure(lines: Lines, keys: Mapping[str, str]) -> doc.Figure | None:
    """Plot measured against predicted step times; on the dashed line they are equal."""
    by_variant: dict[str, list[doc.Point]] = {}
    for (variant, batch, context), found in group_steps(lines).items():
        if {"step_predicted", "step_measured"} <= found.keys():
            predicted, measured = (
                found[metric]["value"] * 1000 for metric in ("step_predicted", "step_measured")
            )
            text = f"predicted {format_significant(predicted)} ms"
            text += f", measured {format_significant(measured)} ms"
            tip = (variant, f"batch {batch}, context {context}", text)
            point = doc.Point(predicted, measured, tip, keys.get(variant, ""))
            by_variant.setdefault(variant, []).append(point)
    if not by_variant:
        return None
    variants = list(by_variant.items())[:MAX_VARIANTS]
    largest = max(max(point.x, point.y) for _, points in variants for point in points)
    diagonal = (doc.Point(0.0, 0.0), doc.Point(largest, largest))
    equal = doc.Line("the roofline", diagonal, "muted", "dashed")
    layers = [doc.Points(v, tuple(p), doc.SERIES[n]) for n, (v, p) in enumerate(variants)]
    x, y = doc.Axis("time of a step by the roofline (ms)"), doc.Axis("measured time, p50 (ms)")
    caption = texts.fill("caption of the roofline")
    return doc.Figure("roofline", caption, caption, doc.Plot(x, y, (equal, *layers)))


# Lines of a study: one per cell, the mean over its seeds

_OWN_FIELDS = ("metric", "batch_size", "prompt_tokens", "context_length", "cached")
_LINE_KEY = (*_OWN_FIELDS, *name_members("line_keys"))


def benchmark_lines(study: Study, max_cells: int) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the lines of the baseline and of the cells that differ from it in one factor.

    A line is a `kvlab.benchmark.measurement.Measurement` as plain data. Its ``variant`` is the
    cell's label, its value the mean over seeds, ``low`` and ``high`` are the smallest and largest
    value (with one seed, the measurement's own interval).

    Args:
        max_cells: Number of cells after which further cells are left out.

    Returns:
        The lines, and the cells' keys by label.
    """
    lines: list[dict[str, Any]] = []
    keys: dict[str, str] = {}
    for levels in study.cells:
        if study.n_changed_factors(levels) <= 1 and len(keys) < max_cells:
            found = cell_lines(study, levels)
            keys |= {study.label(levels): study.cell_key(levels)} if found else {}
            lines += found
    return lines, keys


def cell_lines(study: Study, levels: Levels) -> list[dict[str, Any]]:
    """Return the lines of one cell; see `benchmark_lines`."""
    by_key: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in study.cells[levels].values():
        for line in row.record.get("benchmark", []) if row.is_done else []:
            if line.get("value") is not None:
                key = tuple(line.get(name) for name in _LINE_KEY)
                by_key.setdefault(key, []).append(line)
    means = []
    for lines in by_key.values():
        values = [line["value"] for line in lines]
        mean: dict[str, Any] = {**lines[0], "variant": study.label(levels)}
        mean |= {"value": math.fsum(values) / len(values)}
        if len(lines) > 1:
            mean |= {"low": min(values), "high": max(values), "quantiles": []}
        means.append(mean | {"noisy": any(line.get("noisy") for line in lines)})
    return means


def cell_experiment(study: Study, levels: Levels) -> Experiment | None:
    """Return a cell's recorded experiment; None if no trial of it has ended.

    None, too, if it has extensions: a report runs no code of a record.
    """
    for row in study.cells.get(levels, {}).values():
        if "experiment" in row.record and not row.record["experiment"].get("extensions"):
            # a record may have settings of an earlier version, at what was their default
            return Experiment.model_validate(row.record["experiment"], extra="ignore")
    return None
