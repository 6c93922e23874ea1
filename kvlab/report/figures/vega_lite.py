"""Describe a plot as a Vega-Lite specification, for the interactive figures of the page.

Colours are the page's CSS variables, so that figures follow its theme. The page sets three
parameters: ``picked``, the keys of the selected cells; ``at``, the point that the keyboard is on;
``units``, those of bytes. `kvlab/report/page/page.js` draws the specification.

Vega-Lite: Satyanarayan, Moritz, Wongsuphasawat, Heer (2017), IEEE TVCG 23(1).
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.figures.plot import Axis, Line, Plot, Point, Points, Role

Spec = dict[str, Any]

VEGA_LITE_VERSION = "6.4"

_SHAPES = {
    "dot": "circle", "ring": "circle", "square": "square", "diamond": "diamond",
    "triangle": "triangle-up",
}  # fmt: skip

_SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
_HEIGHT, _HALF_HEIGHT, _ROW_HEIGHT = 340, 300, 34
_LINE_TIPS = 60
"""Points of a line that show their values on hovering."""

_PICKED = "!length(picked) || !datum.key || indexof(picked, datum.key) >= 0"


def vega_lite_spec(plot: Plot, is_half: bool = False) -> Spec:
    """Return the specification of a plot.

    Args:
        plot: The plot.
        is_half: Whether the figure stands beside another.
    """
    names = plot.y.names
    height = _HALF_HEIGHT if is_half else _HEIGHT
    if plot.y.kind == "names":
        rows = _ROW_HEIGHT * len(names)
        height = max(rows, height - 40) if is_half and len(names) > 2 else rows
    encodings = ["x"] if plot.y.kind == "names" else ["x", "y"]
    layers = [*_references(plot), *_lines(plot), *_bars(plot), *_seeds(plot), *_marks(plot)]
    layers += _anchors(plot)
    for layer in layers:
        if "encoding" in layer and None not in layer["encoding"].values():
            layer["params"] = [_zoom(encodings)]  # of one layer that has both axes
            break
    return {
        "$schema": _SCHEMA,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "params": [
            {"name": "picked", "value": []},
            {"name": "at", "value": -1},
            {"name": "units", "value": "binary"},
            {"name": "names", "value": [sanitize_line(name) for name in names or plot.x.names]},
        ],
        "encoding": {"x": _axis(plot.x, plot, "x"), "y": _axis(plot.y, plot, "y")},
        "layer": layers,
        "config": _CONFIG,
    }


_CONFIG: Spec = {
    "background": None,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None, "cursor": "default"},
    "axis": {
        "labelColor": "var(--ink)", "titleColor": "var(--ink)", "gridColor": "var(--grid)",
        "domainColor": "var(--muted)", "tickColor": "var(--muted)", "titleFontWeight": "normal",
        "labelFontSize": 11, "titleFontSize": 12, "labelLimit": 240,
    },
    "legend": {
        "labelColor": "var(--ink)", "labelFontSize": 11, "orient": "top", "direction": "horizontal",
        "columns": 4, "labelLimit": 260, "offset": 6, "symbolStrokeWidth": 1.8,
    },
}  # fmt: skip


def _zoom(encodings: list[str]) -> Spec:
    """Return the parameter that moves the axes: by dragging, and by the wheel with a key."""
    return {
        "name": "zoom",
        "bind": "scales",
        "select": {
            "type": "interval",
            "encodings": encodings,
            "zoom": "wheel![event.ctrlKey || event.metaKey || event.shiftKey]",
            "translate": "[pointerdown[event.pointerType === 'mouse'], window:pointerup]"
            " > window:pointermove!",
        },
    }


def _axis(axis: Axis, plot: Plot, name: str) -> Spec:
    encoding: Spec = {"field": name, "type": "quantitative", "title": sanitize_line(axis.title)}
    if axis.kind == "hidden":
        return {**encoding, "title": None, "axis": None, "scale": {"domain": [-0.06, 1.06]}}
    if axis.kind == "names" and name == "x":
        scale = {"domain": [-0.35, len(axis.names) - 0.4], "nice": False, "zero": False}
        columns = {"values": list(range(len(axis.names))), "labelExpr": "names[datum.value]"}
        return {**encoding, "title": None, "scale": scale, "axis": columns}
    if axis.kind == "names":
        rows = len(axis.names)
        scale = {"domain": [rows - 0.4, -0.6], "nice": False, "zero": False}
        ticks = {"values": list(range(rows)), "labelExpr": "names[datum.value]", "grid": False}
        return {**encoding, "title": None, "scale": scale, "axis": ticks}
    low, high = _limits(plot, name)
    if axis.kind == "linear":
        room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        scale = {"domain": [low - room, high + room], "nice": False, "zero": False}
        return {**encoding, "scale": scale, "axis": {"labelExpr": _NUMBER, "tickCount": 7}}
    base = 2 if axis.kind == "bytes" else 10
    ticks = {"values": {"expr": f"powers(domain('{name}'), {base})"}, "labelOverlap": "greedy"}
    room = max((high / low) ** 0.1, base**0.25)
    scale = {"type": "log", "base": base, "domain": [low / room, high * room], "nice": False}
    label = "bytes(datum.value, units)" if axis.kind == "bytes" else "spread(datum.value)"
    return {**encoding, "scale": scale, "axis": {"labelExpr": label, **ticks}}


_NUMBER = "number(datum.value, datum.label)"


def _limits(plot: Plot, name: str) -> tuple[float, float]:
    """Return the smallest and the largest value on an axis, of bars, seeds and lines too."""
    values = [one.value for one in plot.references if one.axis == name]
    is_seed_axis = (name == "x") == (plot.y.kind == "names")
    for layer in plot.layers:
        for point in layer.points:
            ends = point.x_range if name == "x" else point.y_range
            values += [point.x if name == "x" else point.y, *(ends or ())]
            values += point.seeds if is_seed_axis else ()
    return (min(values), max(values)) if values else (0.0, 1.0)


def _references(plot: Plot) -> Iterator[Spec]:
    for one in plot.references:
        color = "var(--muted)" if one.is_dashed else "var(--ink)"
        dash = [4, 3] if one.is_dashed else [1, 0]
        yield {
            "data": {"values": [{one.axis: one.value}]},
            "mark": {"type": "rule", "color": color, "strokeDash": dash, "opacity": 0.7},
            "encoding": {"y" if one.axis == "x" else "x": None},
        }


def _lines(plot: Plot) -> Iterator[Spec]:
    for line in plot.layers:
        if not isinstance(line, Line) or len(line.points) < 2:
            continue
        rows = [
            {"x": p.x, "y": p.y, "key": line.points[0].key, "series": sanitize_line(line.name)}
            for p in line.points
        ]
        dash = {"strokeDash": [5, 4]} if line.dashed else {}
        yield {
            "data": {"values": [{**row, "order": n} for n, row in enumerate(rows)]},
            "mark": {"type": "line", "strokeWidth": 1.8, "clip": True, **dash},
            "encoding": {
                "order": {"field": "order"},
                **_color(plot, line.name, line.role),
                "opacity": _opacity(1.0),
            },
        }


def _bars(plot: Plot) -> Iterator[Spec]:
    for axis in ("x", "y"):
        rows = [
            {"x": p.x, "y": p.y, axis: ends[0], "end": ends[1], **_identity(p, layer.role)}
            for layer in plot.layers
            for p in layer.points
            if (ends := p.x_range if axis == "x" else p.y_range)
        ]
        if rows:
            yield {
                "data": {"values": rows},
                "mark": {"type": "rule", "strokeWidth": 1.4, "clip": True},
                "name": f"bars_{axis}",
                "encoding": {
                    f"{axis}2": {"field": "end"},
                    "color": {"field": "color", "type": "nominal", "scale": None},
                    "opacity": _opacity(1.0),
                },
            }


def _seeds(plot: Plot) -> Iterator[Spec]:
    axis = "x" if plot.y.kind == "names" else "y"
    offset = {"yOffset": 8} if axis == "x" else {"xOffset": 6}
    rows = [
        {"x": point.x, "y": point.y, axis: value, **_identity(point, layer.role)}
        for layer in plot.layers
        for point in layer.points
        for value in point.seeds
    ]
    if rows:
        yield {
            "data": {"values": rows},
            "mark": {"type": "circle", "size": 14, "clip": True, **offset},
            "encoding": {
                "color": {"field": "color", "type": "nominal", "scale": None},
                "opacity": _opacity(0.55),
            },
        }


def _marks(plot: Plot) -> Iterator[Spec]:
    """Yield one layer of marks for each series; those of lines show on hovering alone."""
    number = 0
    for layer in plot.layers:
        rows = []
        for point in _answering(layer):
            rows.append({"x": point.x, "y": point.y, "n": number, **_texts(point)})
            number += 1
        if not rows:
            continue
        if isinstance(layer, Line):
            size = 40 if len(layer.points) > 1 else 60
            mark = {"type": "point", "filled": True, "size": size, "color": f"var(--{layer.role})"}
            hidden = 0 if len(layer.points) > 1 else 1
            opacity: Spec = {"condition": {"test": "datum.n === at", "value": 1}, "value": hidden}
            encoding: Spec = {"opacity": opacity}
        else:
            mark = {"type": "point", "filled": layer.shape != "ring", "size": 70}
            mark |= {"shape": _SHAPES[layer.shape], "opacity": 1}
            encoding = {**_color(plot, layer.name, layer.role), "opacity": _opacity(1.0)}
            encoding |= _shape(plot, layer)
            if layer.shape != "ring":
                encoding["stroke"] = {
                    "condition": {"test": "datum.n === at", "value": "var(--ink)"},
                    "value": None,
                }
        series = {"series": sanitize_line(layer.name)}
        yield {
            "name": f"marks_{number}",
            "data": {"values": [{**row, **series} for row in rows]},
            "mark": {**mark, "clip": True, "tooltip": {"content": "data"}, "cursor": "pointer"},
            "encoding": encoding,
        }


def _anchors(plot: Plot) -> Iterator[Spec]:
    """Yield invisible marks that the page writes the labels beside."""
    rows = [
        {"x": p.x, "y": p.y, "label": sanitize_line(p.label), "key": p.key}
        for layer in plot.layers
        for p in layer.points
        if p.label
    ]
    if rows:
        yield {
            "name": "anchors",
            "data": {"values": rows},
            "mark": {"type": "point", "size": 70, "opacity": 0},
            "encoding": {},
        }


def _answering(layer: Points | Line) -> Iterable[Point]:
    """Return the points that answer to the pointer; of a long line some."""
    if isinstance(layer, Points):
        return layer.points
    last, step = len(layer.points) - 1, max(1, len(layer.points) // _LINE_TIPS)
    points = (p for n, p in enumerate(layer.points) if n % step == 0 or n == last)
    return [point for point in points if point.tip]


def _texts(point: Point) -> Spec:
    return {"key": point.key, "tip": sanitize_text("\n".join(point.tip))}


def _identity(point: Point, role: Role) -> Spec:
    return {"key": point.key, "color": f"var(--{role})"}


def _opacity(value: float) -> Spec:
    return {"condition": {"test": _PICKED, "value": value}, "value": 0.15 * value}


def _named(plot: Plot) -> list[Points | Line]:
    named = [layer for layer in plot.layers if layer.name and layer.points]
    return named if len(named) > 1 else []


def _color(plot: Plot, name: str, role: Role) -> Spec:
    """Encode the series as colour, with a legend if there are several names."""
    named = _named(plot)
    if not name or not named:
        return {"color": {"value": f"var(--{role})"}}
    domain = list(dict.fromkeys(sanitize_line(layer.name) for layer in named))
    roles = {sanitize_line(layer.name): f"var(--{layer.role})" for layer in reversed(named)}
    scale = {"domain": domain, "range": [roles[one] for one in domain]}
    return {"color": {"field": "series", "type": "nominal", "title": None, "scale": scale}}


def _shape(plot: Plot, layer: Points) -> Spec:
    named = _named(plot)
    if not layer.name or not named:
        return {}
    domain = list(dict.fromkeys(sanitize_line(one.name) for one in named))
    shapes = {
        sanitize_line(one.name): _SHAPES[one.shape] if isinstance(one, Points) else "stroke"
        for one in reversed(named)
    }
    scale = {"domain": domain, "range": [shapes[one] for one in domain]}
    return {"shape": {"field": "series", "type": "nominal", "title": None, "scale": scale}}


# The script


@cache
def bundle_vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that sets ``vegaEmbed``.

    The bundle comes out of the package vl-convert-python and takes seconds to make, so it is kept
    in the user's cache folder.
    """
    from platformdirs import user_cache_path

    from kvlab.fs.atomic_files import write_atomic

    release = version("vl-convert-python")
    path = user_cache_path("kvlab") / f"vega-{release}-{VEGA_LITE_VERSION}.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        script = _make_bundle()
    with suppress(OSError):  # else it is made again the next time
        write_atomic(path, script)
    return script


def _make_bundle() -> str:
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE_VERSION)
    licence = (files("kvlab.report") / "page" / "VEGA_LICENSE.txt").read_text(encoding="utf-8")
    return f"/*\n{licence}*/\n(function () {{\n{script}\n}})();"
