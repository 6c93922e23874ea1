"""Render a plot as SVG and PNG for files, as SVG inside the page, and as PDF for a paper.

Each mark of an SVG has a title on hovering. The titles are in transparent circles over the marks,
so no script is needed. A circle also has the key of its cell, by which the page selects it.
"""

import io
import re
from collections.abc import Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from kvlab.humanize import sanitize_text
from kvlab.report.figures.axes import (
    COLORS,
    FIGURE_WIDTH,
    GRID_COLOR,
    draw_plot,
    figure_style,
)
from kvlab.report.figures.plot import Line, Plot, Points
from kvlab.report.formatting import MINUS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_LINE_TITLES = 60
"""Points of a line that have a title."""

_SEED_RADIUS = 2

_THEME = {color: f"var(--{role})" for role, color in COLORS.items()} | {
    "#000000": "var(--ink)", "#ffffff": "var(--ground)", GRID_COLOR: "var(--grid)",
}  # fmt: skip
"""Colours of figures -> variables of the page's style sheet."""


_PDF_STYLE: dict[str, Any] = {
    "font.family": ["STIXGeneral", "DejaVu Sans"],  # the first is drawn after Times
    "font.size": 8.0, "xtick.labelsize": 8.0, "ytick.labelsize": 8.0, "legend.fontsize": 8.0,
    "mathtext.fontset": "stix", "lines.linewidth": 1.0, "lines.markersize": 4.0,
    "pdf.fonttype": 42,  # TrueType: publishers refuse the default, Type 3
}  # fmt: skip


def render_pdf(plot: Plot, name: str, width: float) -> bytes:
    """Render a plot as one PDF page, with text of 8 pt and fonts embedded as TrueType.

    Args:
        plot: The plot.
        name: Name of the figure.
        width: Width of the page, in inches.
    """
    with figure_style(name, _PDF_STYLE):
        figure, pdf = draw_plot(plot, width), io.BytesIO()
        no_metadata = {"CreationDate": None, "Creator": None, "Producer": None}
        figure.savefig(pdf, format="pdf", metadata=no_metadata)
    return pdf.getvalue()


_DIGITS = re.compile(r"(?<![\w.])(-?[1-9]\d*\.\d\d)\d+")
"""Coordinates to a hundredth of a point: what follows is half of a file and nothing to see."""


def render_files(plot: Plot, name: str) -> tuple[bytes, bytes]:
    """Render a plot as the contents of an SVG and a PNG file.

    Args:
        plot: The plot.
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
        plot: The plot.
        name: Name of the figure; it salts the ids inside the SVG.
        alt: What it shows, in words.
    """
    with figure_style(name, {"svg.fonttype": "none", "font.family": ["sans-serif"]}):
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

    lines = [layer.points for layer in plot.layers if isinstance(layer, Line)]
    for points in lines:
        step = -(-len(points) // _MAX_LINE_TITLES) or 1
        for point in points[::-1][::step]:  # the last one is always there
            if point.tip:
                yield circle(point.x, point.y, 3, point.tip, point.key)
    marks = [p for layer in plot.layers if isinstance(layer, Points) for p in layer.points]
    for point in marks:
        for value in point.seeds:
            x, y = (value, point.y) if is_named else (point.x, value)
            title = (*point.tip[:1], f"one seed: {value:.4g}".replace("-", MINUS))
            yield circle(x, y, _SEED_RADIUS, title)
    for point in marks:
        yield circle(point.x, point.y, 5, point.tip or (point.label,), point.key)
