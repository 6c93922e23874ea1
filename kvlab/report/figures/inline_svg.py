"""Render a plot as SVG inside the HTML page.

Colours are CSS classes, so that figures follow the page's theme. Every point is an element of its
own, which the page's script looks up by its selection key and position.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape
from matplotlib.backend_bases import GraphicsContextBase, RendererBase
from matplotlib.colors import to_hex
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.figures.axes import (
    COLORS,
    DPI,
    MARK_RADIUS,
    MARKS_GROUP,
    DrawnPlot,
    default_settings,
    draw_plot,
    pixel_positions,
)
from kvlab.report.figures.plot import Plot, Point, Points, Role, Shape

if TYPE_CHECKING:
    from matplotlib.font_manager import FontProperties
    from matplotlib.text import Text
    from matplotlib.transforms import Transform

_ROLES = {color: role for role, color in COLORS.items()}
_MAX_LINE_TIPS = 60
"""Points of a line that show their values on hovering."""


def render_inline_svg(plot: Plot, width: float, alt: str, css_class: str) -> Markup:
    """Return one ``<svg>`` element; points with a tip carry it as ``<title>``.

    Args:
        plot: The plot.
        width: Width in pixels.
        alt: Description of the figure.
        css_class: CSS class of the element.
    """
    with default_settings(css_class):
        drawn = draw_plot(plot, width)
        renderer = _InlineRenderer(drawn)
        drawn.figure.patch.set_visible(False)
        drawn.figure.draw(renderer)
    size = f"{_number(renderer.width)}", f"{_number(renderer.height)}"
    head = (
        f'<svg class="plot {css_class}" viewBox="0 0 {" ".join(size)}" width="{size[0]}"'
        f' height="{size[1]}" role="img" aria-label="{escape(sanitize_line(alt))}">'
    )
    body = [*renderer.elements, *_marks(drawn, renderer.height)]
    return Markup("\n".join([head, *body, "</svg>"]))  # every value in it is escaped


class _InlineRenderer(RendererBase):
    """A matplotlib renderer that writes SVG elements with CSS classes instead of colours."""

    def __init__(self, drawn: DrawnPlot):
        super().__init__()
        self.width, self.height = (float(size) for size in drawn.figure.bbox.size)
        self.elements: list[str] = []
        self._keys = {group: iter(keys) for group, keys in drawn.keys.items()}
        self._groups: list[str] = []

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self.width, self.height

    def points_to_pixels(self, points: Any) -> Any:
        return points * DPI / 72

    def open_group(self, s: str, gid: str | None = None) -> None:  # noqa: ARG002
        self._groups.append(gid or "")

    def close_group(self, s: str) -> None:  # noqa: ARG002
        self._groups.pop()

    def draw_path(
        self,
        gc: GraphicsContextBase,
        path: Path,
        transform: "Transform",
        rgbFace: Any = None,
    ) -> None:
        if MARKS_GROUP in self._groups:
            return
        data = _path_data(path, transform, self.height)
        if not gc.get_linewidth():
            self.elements.append(f'<path class="f-{_role(rgbFace)}"{self._key()} d="{data}"/>')
            return
        role = _role(gc.get_rgb())
        width = _number(self.points_to_pixels(gc.get_linewidth()))
        dash = ' stroke-dasharray="5 4"' if gc.get_dashes()[1] is not None else ""
        style = f'stroke-width="{width}"{dash}'
        self.elements.append(f'<path class="s-{role}"{self._key()} {style} d="{data}"/>')

    def draw_markers(
        self,
        gc: GraphicsContextBase,
        marker_path: Path,
        marker_trans: "Transform",
        path: Path,
        trans: "Transform",
        rgbFace: Any = None,
    ) -> None:
        """Draw the caps of error bars and the marks of the legend."""
        for x, y in trans.transform(path.vertices):
            place = Affine2D(marker_trans.get_matrix())
            self.draw_path(gc, marker_path, place.translate(x, y), rgbFace)

    def draw_text(
        self,
        gc: GraphicsContextBase,
        x: float,
        y: float,
        s: str,
        prop: "FontProperties",
        angle: float,
        ismath: Any = False,
        mtext: "Text | None" = None,
    ) -> None:
        """Anchor a text at the side that it is aligned to, since the page's font differs."""
        width, _, _ = self.get_text_width_height_descent(s, prop, ismath)
        alignment = mtext.get_horizontalalignment() if mtext else "center"
        anchor = {"left": "start", "right": "end"}.get(alignment, "middle")
        shift = {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        x, y = (x, y - shift) if angle else (x + shift, y)
        turn = f' transform="rotate(-90 {_number(x)} {_number(y)})"' if angle else ""
        size = _number(self.points_to_pixels(prop.get_size_in_points()))
        words = escape(s)
        self.elements.append(
            f'<text class="f-{_role(gc.get_rgb())}"{self._key()} x="{_number(x)}" y="{_number(y)}"'
            f' font-size="{size}" text-anchor="{anchor}"{turn}>{words}</text>'
        )

    def _key(self) -> str:
        """Return the ``data-key`` attribute of the next element of the current group."""
        keys = (next(self._keys[group]) for group in self._groups if group in self._keys)
        return _key_attribute(next(keys, ""))


def _role(color: Any) -> str:
    return _ROLES[to_hex(color)]


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _key_attribute(key: str) -> str:
    return f' data-key="{escape(key)}"' if key else ""


_COMMANDS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}


def _path_data(path: Path, transform: "Transform", height: float) -> str:
    parts = []
    for vertices, code in path.iter_segments(transform, simplify=False):
        if code == Path.CLOSEPOLY:
            parts.append("Z")
            continue
        places = zip(vertices[::2], vertices[1::2], strict=True)
        listed = " ".join(f"{_number(x)},{_number(height - y)}" for x, y in places)
        parts.append(f"{_COMMANDS[code]}{listed}")
    return "".join(parts)


def _marks(drawn: DrawnPlot, height: float) -> Iterator[str]:
    for layer in drawn.plot.layers:
        positions = pixel_positions(drawn, layer.points)
        if isinstance(layer, Points):
            for point, (x, y) in zip(layer.points, positions, strict=True):
                yield _mark(point, layer.role, x, height - y, layer.shape, MARK_RADIUS)
            continue
        last, step = len(positions) - 1, max(1, len(positions) // _MAX_LINE_TIPS)
        for number, (point, (x, y)) in enumerate(zip(layer.points, positions, strict=True)):
            if point.tip and (number % step == 0 or number == last):
                yield _mark(point, layer.role, x, height - y, "dot", 0 if last else 2.5)


def _mark(point: Point, role: Role, x: float, y: float, shape: Shape, radius: float) -> str:
    """Return one mark; a mark of radius 0 is invisible and only answers to hovering."""
    tip = sanitize_text("\n".join(point.tip))
    title = f"<title>{escape(tip)}</title>" if tip else ""
    position = f' data-x="{_number(x)}" data-y="{_number(y)}"' if tip else ""
    drawing = _shape(shape, role, x, y, radius) if radius else ""
    key = _key_attribute(point.key)
    return f'<g class="mark f-{role}"{key}{position}>{drawing}{title}</g>'


_CORNERS = {
    "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
    "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
    "triangle": ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
}


def _shape(shape: Shape, role: Role, x: float, y: float, radius: float) -> str:
    if shape in _CORNERS:
        corners = _CORNERS[shape]
        places = (f"{_number(x + radius * dx)},{_number(y + radius * dy)}" for dx, dy in corners)
        return f'<polygon points="{" ".join(places)}"/>'
    ring = f' class="s-{role}" fill="none" stroke-width="1.8"' if shape == "ring" else ""
    return f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"{ring}/>'
