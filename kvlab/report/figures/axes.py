"""Draw a plot with matplotlib's axes, ticks and legend, and render it as SVG and PNG files.

The files have a white background and text as paths. The same plot gives the same bytes: they hold
no dates and no random ids, and the reader's matplotlib settings have no effect.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from kvlab.humanize import sanitize_line
from kvlab.report.figures.plot import Line, Plot, Point, Points
from kvlab.report.formatting import (
    format_fixed,
    format_mebibytes,
    format_megabytes,
    format_spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

FIGURE_WIDTH = 820.0
"""Width of figure files, in pixels."""

COLORS = {
    "ink": "#1b1f24", "muted": "#8a9199", "grid": "#e6e8eb",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#bc819a", "c3": "#040716",
    "c4": "#7d0064", "c5": "#002695", "c6": "#6d0004", "c7": "#768050",
}  # fmt: skip
"""Colours by role. The first two series are those of Okabe and Ito, darkened for a white ground;
the others maximize the smallest difference between any two under every kind of colour blindness."""

DPI = 96.0
MARK_RADIUS = 4.5
_TITLE_SIZE, _TEXT_SIZE = 12.0, 11.0
_NAME_ROW_HEIGHT = 26.0
_CHARACTER_WIDTH = 0.58
"""Mean width of a character, in font sizes. The page's font is not known, so this is generous."""

_MARKERS = {"dot": "o", "ring": "o", "square": "s", "diamond": "D", "triangle": "^"}


@dataclass
class DrawnPlot:
    """A plot on matplotlib axes.

    Attributes:
        plot: The plot.
        figure: The matplotlib figure, laid out.
        axes: Its axes.
        keys: Group id of an artist -> selection keys of the elements that it draws, in order.
    """

    plot: Plot
    figure: "Figure"
    axes: "Axes"
    keys: dict[str, list[str]]


MARKS_GROUP = "marks"
"""Group id of the artists that draw the points' marks."""


def render_files(plot: Plot, name: str) -> tuple[bytes, bytes]:
    """Render a plot as the contents of an SVG and a PNG file.

    Args:
        plot: The plot.
        name: Name of the figure; it salts the ids inside the SVG.
    """
    from matplotlib.patheffects import withStroke

    with default_settings(name):
        drawn = draw_plot(plot, FIGURE_WIDTH)
        for label in drawn.axes.texts:
            label.set_path_effects([withStroke(linewidth=2.2, foreground="white")])
        figure, svg, png = drawn.figure, io.BytesIO(), io.BytesIO()
        no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(svg, format="svg", metadata=no_metadata)
        figure.savefig(png, format="png", dpi=2 * DPI, metadata={"Software": None})
    return svg.getvalue(), png.getvalue()


@contextmanager
def default_settings(salt: str) -> Iterator[None]:
    """Use matplotlib's defaults, whatever the settings files on this machine say."""
    import matplotlib

    settings = {"svg.hashsalt": salt, "svg.fonttype": "path", "font.family": ["DejaVu Sans"]}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(settings)  # type: ignore[arg-type]
        yield


def draw_plot(plot: Plot, width: float) -> DrawnPlot:
    """Draw a plot on ``width`` pixels; the height follows from its content."""
    from matplotlib.figure import Figure

    legend_columns, legend_rows = _legend_grid(plot, width)
    height = _axes_height(plot, width) + 20 * legend_rows + (80 if plot.x.kind == "bytes" else 66)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    drawn = DrawnPlot(plot, figure, axes, {})
    _style_axes(axes)
    _set_scales(drawn, width)
    for number, layer in enumerate(plot.layers):
        if isinstance(layer, Line):
            _draw_line(drawn, layer, number)
        else:
            _draw_points(drawn, layer, number)
    if plot.zero:
        axes.axvline(0.0, color=COLORS["ink"], linewidth=_points(1.2), zorder=1.5)
    if legend_rows:
        _draw_legend(drawn, legend_columns, width)
    layout = figure.get_layout_engine()
    assert layout is not None, "the figure has a constrained layout"
    layout.execute(figure)
    figure.set_layout_engine("none")  # once is enough, also where the figure is saved twice
    _draw_labels(drawn)
    return drawn


def _points(pixels: float) -> float:
    return pixels * 72 / DPI


def _axes_height(plot: Plot, width: float) -> float:
    if plot.y.kind == "names":
        return _NAME_ROW_HEIGHT * (len(plot.y.names) + 0.2)
    return min(380.0, max(230.0, 0.55 * width))


def _axes_width(plot: Plot, width: float) -> float:
    """Return the approximate width of the axes in pixels."""
    if plot.y.kind != "names":
        return width - 80
    widest = max((_text_width(name) for name in plot.y.names), default=0.0)
    return width - min(widest + 30, 0.42 * width + 14)


def _style_axes(axes: "Axes") -> None:
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.spines["bottom"].set(color=COLORS["muted"], linewidth=_points(1))
    axes.patch.set_visible(False)
    axes.grid(color=COLORS["grid"], linewidth=_points(1))
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=_points(8), labelsize=_points(_TEXT_SIZE))
    axes.tick_params(left=False, bottom=False, labelcolor=COLORS["ink"])
    axes.margins(0.05)


def _set_scales(drawn: DrawnPlot, width: float) -> None:
    plot, axes = drawn.plot, drawn.axes
    style: dict[str, Any] = {"fontsize": _points(_TITLE_SIZE), "color": COLORS["ink"]}
    axes.set_xlabel(
        _literal(_shorten(plot.x.title, _axes_width(plot, width) + 30, _TITLE_SIZE)), **style
    )
    axes.set_ylabel(
        _literal(_shorten(plot.y.title, _axes_height(plot, width) + 40, _TITLE_SIZE)), **style
    )
    if plot.x.kind == "bytes":
        sizes = [point.x for layer in plot.layers for point in layer.points]
        _set_bytes_scale(axes, sizes, max(2, int(_axes_width(plot, width) / 90)))
    elif plot.x.kind == "log":
        _set_log_scale(axes, plot, max(2, int(_axes_width(plot, width) / 62)))
    else:
        _set_linear_ticks(axes.xaxis, max(2, int(_axes_width(plot, width) / 62)))
    if plot.y.kind == "names":
        names = [_literal(_shorten(name, 0.42 * width - 16)) for name in plot.y.names]
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
    else:
        _set_linear_ticks(axes.yaxis, max(2, int(_axes_height(plot, width) / 44)))


def _set_linear_ticks(axis: Any, n_ticks: int) -> None:
    from matplotlib.ticker import MaxNLocator, ScalarFormatter

    class ThousandsFormatter(ScalarFormatter):
        """Separate thousands on an axis that reaches 10,000."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            label = super().__call__(x, pos)
            if max(map(abs, axis.get_view_interval())) < 10_000:
                return label
            decimals = len(label.partition(".")[2])
            return format_fixed(x, decimals)

    axis.set_major_locator(MaxNLocator(n_ticks, steps=[1, 2, 5, 10]))
    formatter = ThousandsFormatter(useOffset=False)
    formatter.set_scientific(False)
    axis.set_major_formatter(formatter)


def _set_bytes_scale(axes: "Axes", sizes: Sequence[float], n_ticks: int) -> None:
    """Use a base-2 logarithmic x axis with ticks in binary and decimal units."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(min(sizes, default=1.0) * 2**-0.35, max(sizes, default=1.0) * 2**0.35)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=n_ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    labels = FuncFormatter(lambda size, _: f"{_binary_size(size)}\n{_decimal_size(size)}")
    axes.xaxis.set_major_formatter(labels)


def _set_log_scale(axes: "Axes", plot: Plot, n_ticks: int) -> None:
    """Use a base-10 logarithmic x axis that holds every point and its bar."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    points = [point for layer in plot.layers for point in layer.points]
    ends = [x for point in points for x in (point.x, *(point.x_range or ()))]
    axes.set_xscale("log")
    axes.set_xlim(min(ends, default=1.0) / 2, max(ends, default=1.0) * 2)
    axes.xaxis.set_major_locator(LogLocator(numticks=n_ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_spread(value, 1)))


def _binary_size(size: float) -> str:
    """Format a size in MiB, or in the largest unit that gives at most four digits."""
    for power, name in ((20, "MiB"), (30, "GiB"), (40, "TiB")):
        if size < 2 ** (power + 10) or name == "TiB":
            return f"{format_mebibytes(size / 2 ** (power - 20))} {name}"
    raise AssertionError("the last unit takes every size")


def _decimal_size(size: float) -> str:
    for unit, name in ((10**6, "MB"), (10**9, "GB"), (10**12, "TB")):
        if size < 1000 * unit or name == "TB":
            return f"{format_megabytes(size / unit * 10**6)} {name}"
    raise AssertionError("the last unit takes every size")


def _draw_line(drawn: DrawnPlot, line: Line, number: int) -> None:
    if len(line.points) > 1:
        group = f"line-{number}"
        drawn.axes.plot(
            [point.x for point in line.points],
            [point.y for point in line.points],
            linestyle="--" if line.dashed else "-",
            linewidth=_points(1.8),
            color=COLORS[line.role],
            gid=group,
        )
        drawn.keys[group] = [line.points[0].key]
    elif line.points:
        _draw_marks(drawn, Points("", line.points, line.role), 2.5)


def _draw_points(drawn: DrawnPlot, layer: Points, number: int) -> None:
    _draw_marks(drawn, layer, MARK_RADIUS)
    for axis in ("x", "y"):
        bars = [(p, ends) for p in layer.points if (ends := _bar(p, axis))]
        if not bars:
            continue
        errors = [
            [getattr(point, axis) - ends[0] for point, ends in bars],
            [ends[1] - getattr(point, axis) for point, ends in bars],
        ]
        _, caps, (stems,) = drawn.axes.errorbar(
            [point.x for point, _ in bars],
            [point.y for point, _ in bars],
            xerr=errors if axis == "x" else None,
            yerr=errors if axis == "y" else None,
            fmt="none",
            ecolor=COLORS[layer.role],
            elinewidth=_points(1.4),
            capsize=_points(4),
            capthick=_points(1.4),
        )
        for part, artist in enumerate((stems, *caps)):
            group = f"bars-{number}-{axis}-{part}"
            artist.set_gid(group)
            drawn.keys[group] = [point.key for point, _ in bars]


def _bar(point: Point, axis: str) -> tuple[float, float] | None:
    ends = point.x_range if axis == "x" else point.y_range
    return ends if ends and ends[0] != ends[1] else None


def _draw_marks(drawn: DrawnPlot, layer: Points, radius: float) -> None:
    drawn.axes.plot(
        [point.x for point in layer.points],
        [point.y for point in layer.points],
        gid=MARKS_GROUP,
        zorder=3,
        **_mark_style(layer, radius),
    )


def _mark_style(layer: Points, radius: float) -> dict[str, Any]:
    is_ring, color = layer.shape == "ring", COLORS[layer.role]
    return {
        "linestyle": "none",
        "marker": _MARKERS[layer.shape],
        "markersize": _points(2 * radius),
        "markerfacecolor": "none" if is_ring else color,
        "markeredgecolor": color,
        "markeredgewidth": _points(1.8) if is_ring else 0,
    }


def _legend_layers(plot: Plot) -> list[Points | Line]:
    layers = [layer for layer in plot.layers if layer.name and layer.points]
    return layers if len(layers) > 1 else []


def _legend_grid(plot: Plot, width: float) -> tuple[int, int]:
    """Return the columns and rows of the legend: as few rows as the width allows."""
    widths = [_text_width(layer.name) + 48 for layer in _legend_layers(plot)]
    for columns in range(len(widths), 0, -1):
        rows = -(-len(widths) // columns)
        column_widths = [max(widths[n * rows : (n + 1) * rows], default=0) for n in range(columns)]
        if sum(column_widths) <= width or columns == 1:
            return columns, rows
    return 0, 0


def _draw_legend(drawn: DrawnPlot, columns: int, width: float) -> None:
    from matplotlib.lines import Line2D

    layers = _legend_layers(drawn.plot)
    handles = []
    for layer in layers:
        if isinstance(layer, Line):
            style: dict[str, Any] = {
                "color": COLORS[layer.role], "linewidth": _points(2.0),
                "linestyle": "--" if layer.dashed else "-",
            }  # fmt: skip
        else:
            style = _mark_style(layer, MARK_RADIUS)
        handles.append(Line2D([], [], label=_literal(_shorten(layer.name, width - 50)), **style))
    legend = drawn.figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, borderpad=0,
        handlelength=2.2, handletextpad=0.6, columnspacing=1.4, fontsize=_points(_TEXT_SIZE),
        labelcolor=COLORS["ink"],
    )  # fmt: skip
    for number, layer in enumerate(layers):
        key = layer.points[0].key if isinstance(layer, Line) else ""
        for artist in (legend.legend_handles[number], legend.get_texts()[number]):
            assert artist is not None, "every layer of the legend has a handle"
            group = f"legend-{number}-{artist.__class__.__name__}"
            artist.set_gid(group)
            drawn.keys[group] = [key]


def _draw_labels(drawn: DrawnPlot) -> None:
    """Write each label beside its mark where it overlaps nothing; otherwise leave it out."""
    from matplotlib.transforms import Bbox

    points = [point for layer in drawn.plot.layers for point in layer.points]
    marks = [
        Bbox.from_bounds(x - 5, y - 5, 10, 10)
        for layer in drawn.plot.layers
        if isinstance(layer, Points)
        for x, y in pixel_positions(drawn, layer.points)
    ]
    obstacles = [*_line_paths(drawn)]
    numbers = count()
    for point in points:
        if not point.label:
            continue
        text = drawn.axes.annotate(
            _literal(point.label), (point.x, point.y), (0, 0), textcoords="offset points",
            fontsize=_points(_TEXT_SIZE), color=COLORS["ink"], zorder=4,
        )  # fmt: skip
        text.set_in_layout(False)
        group = f"label-{next(numbers)}"
        text.set_gid(group)
        drawn.keys[group] = [point.key]
        for x, y, alignment in _label_offsets():
            text.set(position=(_points(x), _points(y)), horizontalalignment=alignment)
            box = text.get_window_extent().padded(1)
            if _is_free(drawn, box, marks, obstacles):
                marks.append(box)
                break
        else:
            text.remove()


def _is_free(drawn: DrawnPlot, box: "Bbox", boxes: "list[Bbox]", paths: list[Any]) -> bool:
    frame = drawn.axes.get_window_extent()
    is_inside = frame.containsx(box.x0) and frame.containsx(box.x1)
    is_inside = is_inside and frame.containsy(box.y0) and frame.containsy(box.y1)
    crosses = any(path.intersects_bbox(box, filled=False) for path in paths)
    return is_inside and not crosses and not box.count_overlaps(boxes)


def _line_paths(drawn: DrawnPlot) -> Iterator[Any]:
    """Yield the lines and error bars of the axes, in pixels."""
    from matplotlib.collections import LineCollection

    for line in drawn.axes.lines:
        if line.get_linestyle() != "None":
            yield line.get_transform().transform_path(line.get_path())
    for bars in drawn.axes.collections:
        if isinstance(bars, LineCollection):
            for path in bars.get_paths():
                yield bars.get_transform().transform_path(path)


def _label_offsets() -> Iterator[tuple[float, float, str]]:
    """Yield offsets of a label from its mark and its alignment: near before far, right first."""
    for far in (0.0, 10.0, 22.0):
        yield 9 + far / 2, -4 + far, "left"
        yield 9 + far / 2, -4 - far, "left"
        yield -9 - far / 2, -4 - far, "right"
        yield -9 - far / 2, -4 + far, "right"
        yield 0.0, 9 + far, "center"
        yield 0.0, -18 - far, "center"


def pixel_positions(drawn: DrawnPlot, points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the positions of points on the figure in pixels, from its lower left corner."""
    if not points:
        return []
    places = drawn.axes.transData.transform([(point.x, point.y) for point in points])
    return [(float(x), float(y)) for x, y in places]


def _text_width(text: str, size: float = _TEXT_SIZE) -> float:
    return _CHARACTER_WIDTH * size * len(text)


def _shorten(text: str, width: float, size: float = _TEXT_SIZE) -> str:
    """Cut a text to about ``width`` pixels."""
    n_characters = max(4, int(width / (_CHARACTER_WIDTH * size)))
    if len(text) <= n_characters:
        return text
    return text[: n_characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _literal(text: str) -> str:
    """Return text in which dollar signs do not start mathematics."""
    return sanitize_line(text).replace("$", r"\$")
