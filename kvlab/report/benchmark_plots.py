"""Figures of benchmark lines: latency and throughput curves, the roofline, and reuse between turns.

`kvlab bench --plots` draws them too, from the lines of one benchmark.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.report.document import Figure
from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point, Points
from kvlab.report.formatting import format_binary_size, format_significant

Lines = Iterable[Mapping[str, Any]]
"""`kvlab.benchmark.measurement.Measurement` as plain data, possibly without its defaults."""

MAX_VARIANTS = len(SERIES) - 1
"""Variants in one figure; the last colour is left for the dashed lines that all share."""


@dataclass(frozen=True)
class Curve:
    """A figure of one metric over one field of the lines.

    Attributes:
        name: Name of the figure.
        metric: Metric of the lines.
        field: Field of the lines on the x axis.
        x_title: Title of the x axis.
        y_title: Title of the y axis.
        scale: Factor from the lines' unit to that of the y axis.
        caption: The figure's caption.
        with_uncached: Whether times without a cache are drawn too, dashed.
    """

    name: str
    metric: str
    field: str
    x_title: str
    y_title: str
    scale: float
    caption: str
    with_uncached: bool = False


CURVES = (
    Curve(
        "first-token", "ttft", "prompt_tokens", "prompt length (tokens)",
        "time to first token (ms)", 1000.0, "Time to first token against prompt length, batch 1.",
    ),
    Curve(
        "token-by-context", "tpot", "prompt_tokens", "tokens before the decoded ones",
        "time per token, p50 (ms)", 1000.0,
        "Time per output token against context, batch 1, with the 95% interval of the median.",
    ),
    Curve(
        "token-without-cache", "tpot", "prompt_tokens", "tokens before the decoded ones",
        "time per token, p50 (ms)", 1000.0,
        "Time per output token against context, batch 1; dashed: without a cache.", True,
    ),
    Curve(
        "throughput-by-batch", "tokens_per_second", "batch_size", "batch (sequences)",
        "tokens per second", 1.0, "Decoded tokens each second against the batch.",
    ),
    Curve(
        "tasks-by-batch", "tasks_per_second", "batch_size", "batch (sequences)",
        "tasks per second", 1.0,
        "Tasks of 256 prompt and 256 sampled tokens each second against the batch, with a cache.",
    ),
)  # fmt: skip


def benchmark_figures(lines: Lines, keys: Mapping[str, str] | None = None) -> Iterator[Figure]:
    """Yield the figures of `CURVES` that the lines have at least two points for.

    Args:
        lines: Benchmark lines.
        keys: Variant -> key of the design's cell, for selection across a page.
    """
    all_lines = list(lines)
    for curve in CURVES:
        figure = _curve_figure(curve, all_lines, keys or {})
        if figure is not None:
            yield figure


def _curve_figure(curve: Curve, lines: Lines, keys: Mapping[str, str]) -> Figure | None:
    series: dict[tuple[str, bool], list[Point]] = {}
    for line in lines:
        is_cached = bool(line.get("cached"))
        if line["metric"] != curve.metric or line.get("value") is None:
            continue
        if is_cached or curve.with_uncached:
            point = _curve_point(curve, line, keys)
            series.setdefault((line["variant"], is_cached), []).append(point)
    series = {key: sorted(points, key=lambda p: p.x) for key, points in series.items()}
    series = {key: points for key, points in series.items() if len(points) > 1}
    variants = list(dict.fromkeys(variant for variant, _ in series))[:MAX_VARIANTS]
    has_uncached = any(not is_cached for _, is_cached in series)
    if not variants or (curve.with_uncached and not has_uncached):
        return None
    layers: list[Line | Points] = []
    for (variant, is_cached), points in series.items():
        if variant in variants:
            role = SERIES[variants.index(variant)]
            name = variant if is_cached else f"{variant}, no cache"
            layers.append(Line(name, tuple(points), role, dashed=not is_cached))
    ranges = "; ".join(
        f"{layer.name}: {format_significant(layer.points[0].y)}"
        f" to {format_significant(layer.points[-1].y)}"
        for layer in layers
    )
    plot = Plot(Axis(curve.x_title), Axis(curve.y_title), tuple(layers))
    return Figure(curve.name, curve.caption, f"{curve.caption} {ranges}.", plot)


def _curve_point(curve: Curve, line: Mapping[str, Any], keys: Mapping[str, str]) -> Point:
    value = line["value"] * curve.scale
    median = next((q for q in line.get("quantiles") or [] if q["q"] == 0.5), line)
    ends = (median.get("low"), median.get("high"))
    interval = tuple(end * curve.scale for end in ends if end is not None)
    unit = "sequences" if curve.field == "batch_size" else "tokens"
    tip = [
        line["variant"],
        f"{line[curve.field]:,} {unit}",
        f"{curve.y_title}: {format_significant(value)}",
    ]
    if line.get("noisy"):
        tip.append(f"noisy: {line.get('note', '')}")
    key = keys.get(line["variant"], "")
    y_range = (interval[0], interval[1]) if len(interval) == 2 else None
    return Point(line[curve.field], value, tuple(tip), key, y_range=y_range)


def roofline_figure(lines: Lines, keys: Mapping[str, str]) -> Figure | None:
    """Plot measured against predicted step times; on the dashed line they are equal."""
    steps: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        if line["metric"] in ("step_predicted", "step_measured"):
            step = (line["variant"], line.get("batch_size"), line.get("context_length"))
            steps.setdefault(step, {})[line["metric"]] = line
    by_variant: dict[str, list[Point]] = {}
    for (variant, batch, context), times in steps.items():
        if len(times) == 2:
            predicted, measured = (
                times[name]["value"] * 1000 for name in ("step_predicted", "step_measured")
            )
            tip = (
                variant,
                f"batch {batch}, context {context}",
                f"predicted {format_significant(predicted)} ms,"
                f" measured {format_significant(measured)} ms",
            )
            point = Point(predicted, measured, tip, keys.get(variant, ""))
            by_variant.setdefault(variant, []).append(point)
    if not by_variant:
        return None
    variants = list(by_variant.items())[:MAX_VARIANTS]
    largest = max(max(point.x, point.y) for _, points in variants for point in points)
    diagonal = (Point(0.0, 0.0), Point(largest, largest))
    equal = Line("the roofline", diagonal, "muted", dashed=True)
    layers = [Points(v, tuple(p), SERIES[n]) for n, (v, p) in enumerate(variants)]
    plot = Plot(
        Axis("time of a step by the roofline (ms)"),
        Axis("measured time, p50 (ms)"),
        (equal, *layers),
    )
    caption = (
        "Measured decode steps against the time that this device's bandwidth and matrix"
        " rate allow. A point below the line is faster than they were measured to be: its model"
        " fits the processor's caches, or the machine was busy then."
    )
    return Figure("roofline", caption, caption, plot)


def reuse_figures(lines: Lines, keys: Mapping[str, str], set_up: str = "") -> Iterator[Figure]:
    """Yield the hit rate of prefix caches by their bytes, and by turn, beside the upper bound.

    Args:
        keys: see `benchmark_figures`.
        set_up: at which budget the turns were measured, as a part of the caption.
    """
    all_lines = list(lines)
    bounds = [line["value"] for line in all_lines if line["metric"] == "hit_rate_exact"]
    for name, x_axis, caption in (
        ("budget", Axis("prefix cache (bytes)", "bytes"),
         "Hit rate against the bytes of the prefix cache."),
        ("turn", Axis("turn of the conversation"), f"Hit rate by turn{set_up}."),
    ):  # fmt: skip
        field = "budget_bytes" if name == "budget" else "turn"
        curves = _collect_curves(all_lines, f"{name}_hit_rate", field)
        ends = [x for curve in curves.values() for x in curve]
        if len(set(ends)) < 2:
            continue
        limits = _collect_curves(all_lines, "turn_hit_rate_exact", "turn")
        limit = next(iter(limits.values()), {})
        if name == "budget":
            limit = dict.fromkeys((min(ends), max(ends)), bounds[0]) if bounds else {}
        yield _reuse_figure(f"reuse-{name}s", curves, limit, x_axis, caption, keys)


def _collect_curves(lines: Lines, metric: str, field: str) -> dict[str, dict[int, float]]:
    """Return the values of a metric by variant and by a field of the lines."""
    curves: dict[str, dict[int, float]] = {}
    for line in lines:
        if line["metric"] == metric and line.get(field):
            curves.setdefault(line["variant"], {})[line[field]] = line["value"]
    return curves


def _reuse_figure(
    name: str,
    curves: Mapping[str, Mapping[int, float]],
    limit: Mapping[int, float],
    x_axis: Axis,
    caption: str,
    keys: Mapping[str, str],
) -> Figure:
    """Plot hit rates; variants of equal curves share a line."""
    equal: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for variant, curve in curves.items():
        equal.setdefault(tuple(sorted(curve.items())), []).append(variant)
    layers = []
    for number, (points, variants) in enumerate(list(equal.items())[: len(SERIES)]):
        label, key = ", ".join(variants), keys.get(variants[0], "")
        drawn = tuple(_reuse_point(x, share, label, x_axis, key) for x, share in points)
        layers.append(Line(label, drawn, SERIES[number], dashed=number % 2 == 1))
    if limit:
        title = "upper bound: any earlier turn"
        drawn = tuple(_reuse_point(x, y, title, x_axis, "") for x, y in sorted(limit.items()))
        layers.append(Line(title, drawn, "muted", dashed=True))
    ranges = "; ".join(
        f"{layer.name}: {format_significant(layer.points[0].y)}%"
        f" to {format_significant(layer.points[-1].y)}%"
        for layer in layers
    )
    plot = Plot(x_axis, Axis("prompt tokens found (%)"), tuple(layers))
    return Figure(name, caption, f"{caption} {ranges}.", plot)


def _reuse_point(x: int, share: float, label: str, x_axis: Axis, key: str) -> Point:
    place = format_binary_size(x) if x_axis.kind == "bytes" else f"turn {x}"
    return Point(float(x), 100 * share, (label, place, f"{100 * share:.2f}% of prompts"), key)
