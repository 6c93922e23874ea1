"""A drawing as SVG and PNG files, by matplotlib: white ground, letters as paths.

The same drawing gives the same bytes: no dates, no random ids, no setting of the reader's.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvlab.humanize import sanitize_line
from kvlab.report.figures.layout import Drawing, Mark

COLORS = {
    "ink": "#1b1f24", "muted": "#8a9199", "grid": "#e6e8eb", "axis": "#8a9199",
    "c0": "#0072b2", "c1": "#d55e00", "c2": "#bc819a", "c3": "#040716",
    "c4": "#7d0064", "c5": "#002695", "c6": "#6d0004", "c7": "#768050",
}  # fmt: skip
"""The first two after Okabe and Ito, darkened for white ground; the others searched for the
largest difference between any two as readers of every kind of colour blindness see them."""

_MARKERS = {"dot": "o", "ring": "o", "square": "s", "diamond": "D", "triangle": "^"}
_DPI = 100.0
_POINTS = 72 / _DPI


def render_picture_files(drawing: Drawing, name: str) -> tuple[bytes, bytes]:
    """The drawing as ``(svg, png)`` bytes; ``name`` salts the ids inside the SVG."""
    with _default_settings(name):
        figure = _figure(drawing)
        svg, png = io.BytesIO(), io.BytesIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        figure.savefig(svg, format="svg", metadata=nothing)
        figure.savefig(png, format="png", dpi=2 * _DPI, metadata={"Software": None})
    return svg.getvalue(), png.getvalue()


@contextmanager
def _default_settings(salt: str) -> Iterator[None]:
    """matplotlib as it comes, whatever a settings file on this machine says."""
    import matplotlib

    ours = {"svg.hashsalt": salt, "svg.fonttype": "path", "font.family": ["DejaVu Sans"]}
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(ours)  # type: ignore[arg-type]
        yield


def _figure(drawing: Drawing) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for order, stroke in enumerate(drawing.strokes):
        xs, ys = zip(*stroke.points, strict=True)
        axes.plot(
            xs,
            ys,
            linestyle="--" if stroke.dashed else "-",
            linewidth=stroke.width * _POINTS,
            color=COLORS[stroke.role],
            zorder=2 + order * 1e-6,
        )
    for (shape, role, radius), marks in _alike(drawing.marks).items():
        axes.plot(
            [mark.x for mark in marks],
            [mark.y for mark in marks],
            linestyle="none",
            marker=_MARKERS[shape],
            markersize=2 * radius * _POINTS * (0.95 if shape == "diamond" else 1),
            markerfacecolor="none" if shape == "ring" else COLORS[role],
            markeredgecolor=COLORS[role],
            markeredgewidth=1.3 if shape == "ring" else 0,
            zorder=3,
        )
    halo = [withStroke(linewidth=2.2, foreground="white")]
    for text in drawing.texts:
        axes.text(
            text.x,
            text.y,
            _literal(text.text),
            fontsize=text.size * _POINTS * 0.95,
            color=COLORS[text.role],
            ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
            va="center" if text.upright else "baseline",
            rotation=90 if text.upright else 0,
            zorder=4,
            path_effects=halo,
        )
    return figure


def _alike(marks: list[Mark]) -> dict[tuple[str, str, float], list[Mark]]:
    """Visible marks that look the same, drawn together: hundreds of them stay fast."""
    groups: dict[tuple[str, str, float], list[Mark]] = {}
    for mark in marks:
        if mark.radius:
            groups.setdefault((mark.shape, mark.role, mark.radius), []).append(mark)
    return groups


def _literal(text: str) -> str:
    """Dollar signs would start mathematics."""
    return sanitize_line(text).replace("$", r"\$")
