"""Draw plots with matplotlib: as SVG and PNG files, as SVG inside the page, and as PDF for a paper.

The same plot gives the same drawing, on a white background: the reader's matplotlib settings have
no effect. Each mark of an SVG has a title on hovering. The titles are in transparent circles over
the marks, so no script is needed. A circle also has the key of its cell, by which the page selects
it.
"""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import escape
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Any

from kvlab.humanize import format_bytes, sanitize_line, sanitize_text
from kvlab.report.document import DASHES, SERIES, Line, Plot, Points
from kvlab.report.formatting import MINUS, format_spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

FIGURE_WIDTH = 6.4
"""Width of figure files, in inches."""

_CSS = files("kvlab.report").joinpath("page/page.css").read_text(encoding="utf-8")

COLORS = dict(re.findall(r"--(ink|muted|c\d): (#\w+)", _CSS.partition("@media")[0]))
"""Colours by role, as the light page has them. The first two series are those of Okabe and
Ito, darkened for a white ground; the others maximize the smallest difference between any two
and from the grey, which colour-blind readers must be able to tell apart as well, and only one
of them is nearly black."""

GRID_COLOR = "#e6e8eb"

MAX_LINE = 30
"""Characters of a line of a name beside its row; longer lines leave no room for the marks."""

MAX_NAME = 44
"""Characters of a name beside an axis or in a legend."""

_MARKERS = {"dot": "o", "ring": "o", "square": "s", "diamond": "D", "triangle": "^"}


@contextmanager
def figure_style(salt: str, *styles: str) -> Iterator[None]:
    """Use matplotlib's defaults and this style, whatever the settings on this machine say.

    Args:
        salt: Salt of the ids in SVG files.
        styles: Further styles in the folder of the page, each a file of ``rcParams``.
    """
    import matplotlib
    import matplotlib.style

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for name in ("figure", *styles):
            with as_file(files("kvlab.report") / "page" / f"{name}.mplstyle") as path:
                matplotlib.style.use(path)
        matplotlib.rcParams["svg.hashsalt"] = salt
        yield


def draw_plot(plot: Plot, width: float) -> "Figure":
    """Draw a plot in the current style; the height follows from its content.

    Args:
        width: Width in inches.

    Returns:
        A matplotlib figure, laid out.
    """
    import matplotlib
    from matplotlib.figure import Figure

    inch = matplotlib.rcParams["font.size"] / 72  # one line of text
    named = [layer for layer in plot.layers if layer.name and layer.points]
    widest = max((len(_shorten(layer.name)) for layer in named), default=0)
    columns = max(1, min(len(named), int(width / inch / (0.55 * widest + 4.5))))
    legend_height = 1.8 * inch * -(-len(named) // columns) if len(named) > 1 else 0.0
    n_lines = max(0.58 * width / inch, 22.0)  # a narrow figure is higher, for its labels
    height = inch * n_lines + legend_height
    if plot.y.kind == "names":
        height = inch * (2.3 * len(plot.y.names) + 4.5) + legend_height
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.06)
    axes = figure.add_subplot()
    _set_axes(axes, plot, n_lines)
    for reference in plot.references:
        draw_line = axes.axvline if reference.axis == "x" else axes.axhline
        style, color = ("--", "muted") if reference.is_dashed else ("-", "ink")
        draw_line(reference.value, color=COLORS[color], linewidth=0.8, linestyle=style, zorder=1.5)
    for layer in plot.layers:
        if isinstance(layer, Line):
            color, alone = COLORS[layer.role], len(layer.points) == 1
            first = SERIES.index(layer.role) % 3 if layer.shape else 0
            axes.plot(
                *_coordinates(layer),
                linestyle=layer.dash,
                marker=_MARKERS[layer.shape] if layer.shape else "o" if alone else "",
                markersize=3 if alone else 4.5,
                markevery=None if alone or not layer.shape else (first, 3),
                markerfacecolor="white" if layer.shape == "ring" else color,
                zorder=1.9 + 0.1 * DASHES.index(layer.dash),
                color=color,
                label=_label(layer),
            )
        else:
            _draw_points(axes, layer, plot.y.kind == "names")
    if plot.x.kind in _POWERS:
        _set_log_ticks(axes, plot.x.kind, max(3, int(width / inch / 6)))
    if len(named) > 1:
        figure.legend(loc="outside upper left", ncols=columns, borderpad=0.2, columnspacing=1.5)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # once is enough, also where the figure is saved twice
    _draw_labels(axes, plot)
    return figure


def _set_axes(axes: "Axes", plot: Plot, height: float) -> None:
    """Set titles, scales and the ticks of names; the height is in lines of text."""
    axes.set_xlabel(_literal(plot.x.title, 90))
    n_characters = int(2 * (height - 5))  # they are half as wide as a line is high
    axes.set_ylabel("\n".join(textwrap.wrap(_literal(plot.y.title, 90), n_characters)))
    axes.margins(0.06)
    if plot.x.kind in _POWERS:
        axes.set_xscale("log")
    if plot.y.kind == "names":
        lines = [textwrap.wrap(_literal(name), MAX_LINE) for name in plot.y.names]
        axes.set_yticks(range(len(lines)), ["\n".join(one) for one in lines])
        axes.set_ylim(len(plot.y.names) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")


_POWERS: dict[str, tuple[int, tuple[tuple[float, ...], ...]]] = {
    "bytes": (2, ((1,), (1, 1.5))),
    "log": (10, ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7))),
}
"""The base of a logarithmic axis, and the multiples of its powers that can have ticks."""


def _set_log_ticks(axes: "Axes", kind: str, most: int) -> None:
    """Set ticks at powers, and between them where fewer than three powers are in view."""
    from matplotlib.ticker import MaxNLocator, NullLocator

    low, high = axes.dataLim.intervalx
    if high < 1.01 * low:  # all marks at one place, around which matplotlib may leave no space
        axes.set_autoscalex_on(False)
        axes.set_xlim(0.4 * low, 2.5 * low)
    low, high = axes.get_xlim()
    base, multiples = _POWERS[kind]
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    choices = [[part * base**power for power in powers for part in parts] for parts in multiples]
    for choice in (*choices, MaxNLocator(most).tick_values(low, high)):
        ticks = [float(tick) for tick in choice if low <= tick <= high]
        if len(ticks) > 2:
            break
    ticks = ticks[:: -(-len(ticks) // most)]
    digits = next(
        n for n in range(1, 18) if all(math.isclose(float(f"{t:.{n}g}"), t) for t in ticks)
    )
    axes.set_xticks(
        ticks,
        [
            format_bytes(round(tick)) if kind == "bytes" else format_spread(tick, digits)
            for tick in ticks
        ],
    )
    axes.xaxis.set_minor_locator(NullLocator())


def _draw_points(axes: "Axes", layer: Points, is_named: bool) -> None:
    """Draw marks, with their error bars and the small dots of their seeds beside them."""
    from matplotlib.transforms import ScaledTranslation

    color = COLORS[layer.role]
    seeds = [seed for point in layer.points for seed in point.seeds]
    if seeds:
        places = [p.y if is_named else p.x for p in layer.points for _ in p.seeds]
        xs, ys = (seeds, places) if is_named else (places, seeds)
        x, y = (0.0, -5 / 72) if is_named else (4 / 72, 0.0)
        figure = axes.get_figure(root=True)
        assert figure is not None, "the axes are on a figure"
        beside = axes.transData + ScaledTranslation(x, y, figure.dpi_scale_trans)
        style: dict[str, Any] = {"linestyle": "", "marker": ".", "markersize": 4, "alpha": 0.6}
        axes.plot(xs, ys, color=color, transform=beside, **style)
    # all bars at once: an object for each takes most of the time where there are hundreds
    for draw_bars, bars in (
        (axes.hlines, [(p.y, *p.x_range) for p in layer.points if p.x_range]),
        (axes.vlines, [(p.x, *p.y_range) for p in layer.points if p.y_range]),
    ):
        if bars:
            draw_bars(*zip(*bars, strict=True), color=color, linewidth=1.2, zorder=2.5)
    axes.plot(
        *_coordinates(layer),
        linestyle="",
        marker=_MARKERS[layer.shape],
        color=color,
        markerfacecolor="none" if layer.shape == "ring" else color,
        zorder=3,
        label=_label(layer),
    )


def _coordinates(layer: Points | Line) -> tuple[list[float], list[float]]:
    return [point.x for point in layer.points], [point.y for point in layer.points]


def _label(layer: Points | Line) -> str:
    """Return the layer's entry in the legend; matplotlib leaves out what starts with ``_``."""
    return _literal(layer.name) if layer.name and layer.points else "_"


def _draw_labels(axes: "Axes", plot: Plot) -> None:
    """Write each label beside its mark, where it overlaps no mark and no other label.

    Marks at one place have one label. It crosses a line or an error bar only if it would have to
    move far from its mark, and is then joined to the mark by a thin line.
    """
    import matplotlib
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    size = matplotlib.rcParams["font.size"]
    is_text = matplotlib.rcParams["svg.fonttype"] == "none"  # the page's style gives it a halo
    halo = [] if is_text else [withStroke(linewidth=2, foreground="white")]
    points = plot.marks
    labels: dict[tuple[float, float], dict[str, None]] = {}
    for point in points:
        if point.label:
            labels.setdefault((point.x, point.y), {})[point.label] = None
    places: Any = axes.transData.transform([(p.x, p.y) for p in points]) if points else []
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in places]
    segments = _iter_segments(axes, plot)
    lines = [Bbox(axes.transData.transform(ends)).padded(1) for ends in segments]
    for place, names in labels.items():
        text = axes.annotate(
            _join_names(list(names)), place, (0, 0), textcoords="offset points",
            fontsize=0.85 * size, color=COLORS["ink"], zorder=4, verticalalignment="center",
            path_effects=halo,
        )  # fmt: skip
        text.set_in_layout(False)
        spots = [spot for spot in _spots(axes, text, size) if not spot[1].count_overlaps(taken)]
        if not spots:
            text.remove()
            continue

        def cost(spot: "tuple[tuple[float, float, str], Bbox]") -> float:
            (right, up, _), box = spot
            return float(max(abs(right), abs(up)) / size + 2 * box.count_overlaps(lines))

        (right, up, alignment), box = min(spots, key=cost)
        text.set(position=(right, up), horizontalalignment=alignment)
        taken.append(box)
        if max(abs(right), abs(up)) > 1.5 * size:
            style = {"color": COLORS["muted"], "linewidth": 0.6, "zorder": 2.2}
            line = {"arrowstyle": "-", "shrinkA": 0, "shrinkB": 3, **style}
            axes.annotate(
                "", place, (right, up), textcoords="offset points", arrowprops=line
            ).set_in_layout(False)


def _join_names(names: list[str]) -> str:
    """Return the label of marks at one place; of many names the first."""
    text = ", ".join(names)
    more = f"{names[0]} and {len(names) - 1} more"
    return _literal(text if len(names) == 1 or len(text) <= MAX_LINE else more)


def _iter_segments(
    axes: "Axes", plot: Plot
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Yield the ends of what labels should not cross: lines, error bars, references."""
    for layer in plot.layers:
        if isinstance(layer, Line):
            for one, other in itertools.pairwise(layer.points):
                yield (one.x, one.y), (other.x, other.y)
    for point in plot.marks:
        if point.x_range:
            yield (point.x_range[0], point.y), (point.x_range[1], point.y)
        if point.y_range:
            yield (point.x, point.y_range[0]), (point.x, point.y_range[1])
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    for reference in plot.references:
        at, is_upright = reference.value, reference.axis == "x"
        yield ((at, bottom), (at, top)) if is_upright else ((left, at), (right, at))


def _spots(axes: "Axes", text: Any, size: float) -> "list[tuple[tuple[float, float, str], Bbox]]":
    """Return the offsets at which a label is inside the axes, near ones first, and its boxes."""
    from matplotlib.transforms import Bbox

    frame, spots = axes.get_window_extent(), []
    text.set(position=(0, 0), horizontalalignment="left")
    near, pixels = text.get_window_extent().padded(1), text.get_figure(root=True).dpi / 72
    shares = {"left": 0.0, "center": 0.5, "right": 1.0}
    for distance in (0.9, 1.7, 2.6, 3.8, 5.2, 7.0, 9.0):
        for x, y, alignment in (
            (1, 0, "left"), (0.7, 0.8, "left"), (0.7, -0.8, "left"), (0, 1.1, "center"),
            (0, -1.1, "center"), (-0.7, 0.8, "right"), (-0.7, -0.8, "right"), (-1, 0, "right"),
        ):  # fmt: skip
            offset = (x * distance * size, y * distance * size, alignment)
            # the text has the same size everywhere, and to lay it out takes long
            left = near.x0 + offset[0] * pixels - shares[alignment] * (near.width - 2)
            bottom = near.y0 + offset[1] * pixels
            box = Bbox.from_bounds(left, bottom, near.width, near.height)
            is_inside = frame.containsx(box.x0) and frame.containsx(box.x1)
            if is_inside and frame.containsy(box.y0) and frame.containsy(box.y1):
                spots.append((offset, box))
    return spots


def _shorten(text: str, most: int = MAX_NAME) -> str:
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _literal(text: str, most: int = MAX_NAME) -> str:
    """Return a short text in which dollar signs do not start mathematics."""
    return _shorten(sanitize_line(text), most).replace("$", r"\$")


# Files

_MAX_LINE_TITLES = 60
"""Points of a line that have a title."""

_SEED_RADIUS = 2

_THEME = {color: f"var(--{role})" for role, color in COLORS.items()} | {
    "#000000": "var(--ink)", "#ffffff": "var(--ground)", GRID_COLOR: "var(--grid)",
}  # fmt: skip
"""Colours of figures -> variables of the page's style sheet."""


_DIGITS = re.compile(r"(?<![\w.])(-?[1-9]\d*\.\d\d)\d+")
"""Coordinates to a hundredth of a point: what follows is half of a file and nothing to see."""


def render_files(plot: Plot, name: str) -> tuple[bytes, bytes]:
    """Render a plot as the contents of an SVG and a PNG file.

    Args:
        name: Name of the figure; it salts the ids inside the SVG.
    """
    with figure_style(name):
        figure = draw_plot(plot, FIGURE_WIDTH)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=200, metadata={"Software": None})
        return _save_svg(figure, plot).encode(), png.getvalue()


def render_inline_svg(plot: Plot, name: str, alt: str) -> str:
    """Render a plot as an ``svg`` element of the page, whose text is text in the page's colours.

    Args:
        name: Name of the figure; it salts the ids inside the SVG.
        alt: What it shows, in words.
    """
    with figure_style(name, "inline"):
        svg = _save_svg(draw_plot(plot, FIGURE_WIDTH), plot)
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None, "matplotlib writes one"
    body = svg[svg.index(">", box.end()) + 1 :]
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)  # for all of a page
    body = re.sub(r'<g id="[^"]*">', "<g>", body)  # every figure has the same ids
    body = re.sub(r"font-family: [^;\"]*; ?", "", body)  # of the page's style
    body = re.sub(r'(?<=: )#[0-9a-f]{6}(?=[;"])', lambda one: _THEME.get(one[0], one[0]), body)
    return f'<svg role="img" aria-label="{escape(sanitize_text(alt))}" {box[0]}>{body}'


def _save_svg(figure: "Figure", plot: Plot) -> str:
    file = io.BytesIO()
    no_metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
    figure.savefig(file, format="svg", metadata=no_metadata)
    text = re.sub(r"<!--.*?-->\n|(?<=\n) +", "", file.getvalue().decode())
    text = _DIGITS.sub(r"\1", text)
    head, end, tail = text.rpartition("</svg>")
    return head + "".join(_hover_circles(figure, plot)) + end + tail


def _hover_circles(figure: "Figure", plot: Plot) -> Iterator[str]:
    """Yield a transparent circle with a title for each mark: of lines, then seeds, then points."""
    (axes,) = figure.axes
    is_named, scale = plot.y.kind == "names", 72 / figure.dpi

    def circle(x: float, y: float, radius: float, title: Iterable[str], key: str = "") -> str:
        pixels = axes.transData.transform((x, y))
        if not axes.bbox.padded(1).contains(*pixels):
            return ""
        left, top = scale * pixels[0], scale * (figure.bbox.height - pixels[1])
        if radius == _SEED_RADIUS:
            left, top = (left, top + 5) if is_named else (left + 4, top)
        cell = f' data-key="{escape(sanitize_text(key))}"' if key else ""
        text = escape(sanitize_text("\n".join(title)))
        return (
            f'<circle cx="{left:.1f}" cy="{top:.1f}" r="{radius}" fill="none"'
            f' pointer-events="all"{cell}><title>{text}</title></circle>\n'
        )

    for points in (layer.points for layer in plot.layers if isinstance(layer, Line)):
        step = -(-len(points) // _MAX_LINE_TITLES) or 1
        for point in points[::-1][::step]:  # the last one is always there
            if point.tip:
                yield circle(point.x, point.y, 3, point.tip, point.key)
    for point in plot.marks:
        for value in point.seeds:
            x, y = (value, point.y) if is_named else (point.x, value)
            title = (*point.tip[:1], f"one seed: {value:.4g}".replace("-", MINUS))
            yield circle(x, y, _SEED_RADIUS, title)
    for point in plot.marks:
        yield circle(point.x, point.y, 5, point.tip or (point.label,), point.key)
