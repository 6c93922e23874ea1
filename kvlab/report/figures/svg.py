"""A drawing as inline SVG for the page: colours by class, so that it follows the theme."""

from collections.abc import Iterator

from markupsafe import Markup, escape

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.figures.layout import Drawing, Mark, Stroke, Text


def to_svg(drawing: Drawing, alt: str, css_class: str = "") -> Markup:
    """One ``<svg>`` element, an image until the page's script makes it answer to keys. Marks with
    a tip carry it as ``<title>``."""
    head = (
        f'<svg class="plot {css_class}" viewBox="0 0 {_n(drawing.width)} {_n(drawing.height)}"'
        f' width="{_n(drawing.width)}" height="{_n(drawing.height)}" role="img"'
        f' aria-label="{escape(sanitize_line(alt))}">'
    )
    body = [
        *map(_stroke, drawing.strokes),
        *map(_text, drawing.texts),
        *map(_mark, drawing.marks),
    ]
    return Markup("\n".join([head, *body, "</svg>"]))  # every value in it is escaped above


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _key(key: str) -> str:
    return f' data-key="{escape(key)}"' if key else ""


def _stroke(stroke: Stroke) -> str:
    places = " ".join(f"{_n(x)},{_n(y)}" for x, y in stroke.points)
    dash = ' stroke-dasharray="5 4"' if stroke.dashed else ""
    width = f' stroke-width="{_n(stroke.width)}"' if stroke.width != 1 else ""
    head = f'<polyline class="s-{stroke.role}"{_key(stroke.key)}{width}{dash}'
    return f'{head} points="{places}"/>'


def _text(text: Text) -> str:
    turn = f' transform="rotate(-90 {_n(text.x)} {_n(text.y)})"' if text.upright else ""
    anchor = "" if text.anchor == "start" else f' text-anchor="{text.anchor}"'
    place = f'x="{_n(text.x)}" y="{_n(text.y)}" font-size="{_n(text.size)}"{anchor}{turn}'
    words = escape(sanitize_line(text.text))
    return f'<text class="f-{text.role}"{_key(text.key)} {place}>{words}</text>'


def _mark(mark: Mark) -> str:
    tip = "\n".join(mark.tip)
    title = f"<title>{escape(sanitize_text(tip))}</title>" if tip else ""
    place = f'data-x="{_n(mark.x)}" data-y="{_n(mark.y)}"' if tip else ""
    shape = "".join(_shape(mark)) if mark.radius else ""
    return f'<g class="mark f-{mark.role}"{_key(mark.key)} {place}>{shape}{title}</g>'


def _shape(mark: Mark) -> Iterator[str]:
    x, y, r = mark.x, mark.y, mark.radius
    if mark.shape in ("dot", "ring"):
        ring = f' class="s-{mark.role}" fill="none" stroke-width="1.8"'
        yield f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(r)}"'
        yield f"{ring if mark.shape == 'ring' else ''}/>"
    else:
        corners = {
            "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
            "diamond": ((0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)),
            "triangle": ((0, -1.3), (1.2, 0.9), (-1.2, 0.9)),
        }[mark.shape]
        places = " ".join(f"{_n(x + r * dx)},{_n(y + r * dy)}" for dx, dy in corners)
        yield f'<polygon points="{places}"/>'
