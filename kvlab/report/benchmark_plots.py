"""A benchmark's curves as plots, from its lines; the report and `kvlab bench --plots` draw them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.report.figures.plot import SERIES, Axis, Line, Plot, Point, Points
from kvlab.report.formatting import format_significant

Lines = Iterable[Mapping[str, Any]]
"""`kvlab.benchmark.measurement.Measurement` as plain data, maybe without its defaults."""

MAX_VARIANTS = len(SERIES) - 1
"""Variants in one figure; the last colour is for the dashed lines that all share."""


@dataclass(frozen=True)
class Curve:
    """What one figure draws: a metric over a field of the lines.

    Attributes:
        scale: the axis shows values times this.
        again: whether the times without a cache are drawn beside it, dashed.
    """

    name: str
    metric: str
    over: str
    x: str
    y: str
    scale: float
    caption: str
    again: bool = False


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


@dataclass(frozen=True)
class Drawn:
    """A figure: its file name, what it shows in words, and the plot."""

    name: str
    caption: str
    alt: str
    plot: Plot


def benchmark_figures(lines: Lines, keys: Mapping[str, str] | None = None) -> Iterator[Drawn]:
    """The figures that the lines have enough points for: two places at least.

    Args:
        keys: variant -> the design's cell, for selection across a page.
    """
    found = list(lines)
    for curve in CURVES:
        drawn = _curve_figure(curve, found, keys or {})
        if drawn is not None:
            yield drawn


def _curve_figure(curve: Curve, lines: Lines, keys: Mapping[str, str]) -> Drawn | None:
    series: dict[tuple[str, bool], list[Point]] = {}
    for line in lines:
        cached = bool(line.get("cached"))
        if line["metric"] != curve.metric or line.get("value") is None:
            continue
        if cached or curve.again:
            point = _curve_point(curve, line, keys)
            series.setdefault((line["variant"], cached), []).append(point)
    series = {key: sorted(points, key=lambda p: p.x) for key, points in series.items()}
    series = {key: points for key, points in series.items() if len(points) > 1}
    variants = list(dict.fromkeys(variant for variant, _ in series))[:MAX_VARIANTS]
    if not variants or (curve.again and not any(not cached for _, cached in series)):
        return None
    layers: list[Line | Points] = []
    for (variant, cached), points in series.items():
        if variant in variants:
            role = SERIES[variants.index(variant)]
            name = variant if cached else f"{variant}, no cache"
            layers.append(Line(name, tuple(points), role, dashed=not cached))
    ends = "; ".join(
        f"{layer.name}: {format_significant(layer.points[0].y)} to {format_significant(layer.points[-1].y)}"
        for layer in layers
    )
    plot = Plot(Axis(curve.x), Axis(curve.y), tuple(layers))
    return Drawn(curve.name, curve.caption, f"{curve.caption} {ends}.", plot)


def _curve_point(curve: Curve, line: Mapping[str, Any], keys: Mapping[str, str]) -> Point:
    value = line["value"] * curve.scale
    middle = next((q for q in line.get("quantiles") or [] if q["q"] == 0.5), line)
    ends = (middle.get("low"), middle.get("high"))
    spread = tuple(end * curve.scale for end in ends if end is not None)
    place = f"{line[curve.over]:,} {'sequences' if curve.over == 'batch_size' else 'tokens'}"
    tip = [line["variant"], place, f"{curve.y}: {format_significant(value)}"]
    if line.get("noisy"):
        tip.append(f"noisy: {line.get('note', '')}")
    key = keys.get(line["variant"], "")
    y_range = (spread[0], spread[1]) if len(spread) == 2 else None
    return Point(line[curve.over], value, tuple(tip), key, y_range=y_range)


def roofline_figure(lines: Lines, keys: Mapping[str, str]) -> Drawn | None:
    """Measured against predicted times; on the dashed line they are equal."""
    places: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        if line["metric"] in ("step_predicted", "step_measured"):
            place = (line["variant"], line.get("batch_size"), line.get("context_length"))
            places.setdefault(place, {})[line["metric"]] = line
    by_variant: dict[str, list[Point]] = {}
    for (variant, batch, context), pair in places.items():
        if len(pair) == 2:
            predicted, measured = (
                pair[name]["value"] * 1000 for name in ("step_predicted", "step_measured")
            )
            tip = (
                variant,
                f"batch {batch}, context {context}",
                f"predicted {format_significant(predicted)} ms, measured {format_significant(measured)} ms",
            )
            point = Point(predicted, measured, tip, keys.get(variant, ""))
            by_variant.setdefault(variant, []).append(point)
    if not by_variant:
        return None
    chosen = list(by_variant.items())[:MAX_VARIANTS]
    far = max(max(point.x, point.y) for _, points in chosen for point in points)
    equal = Line("the roofline", (Point(0.0, 0.0), Point(far, far)), "muted", dashed=True)
    layers = [Points(v, tuple(p), SERIES[n]) for n, (v, p) in enumerate(chosen)]
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
    return Drawn("roofline", caption, caption, plot)
