"""Render a report as one self-contained HTML page: style, scripts and figures are inside.

Every value is escaped by Jinja. Only the specifications of the figures, which are JSON with escaped
brackets, and this package's style sheet and scripts are inserted as they are. Figures are drawn by
Vega, which is part of the page; without scripts a reader sees matplotlib's static figures.
"""

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from kvlab.humanize import sanitize_text
from kvlab.report.document import Cell, Document, Figure
from kvlab.report.figures.vega_lite import bundle_vega, vega_lite_spec
from kvlab.report.formatting import round_to_shared_digits

if TYPE_CHECKING:
    from markupsafe import Markup


def render_html(document: Document) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    numbers = document.numbers
    template = environment.from_string(_read_asset("page.html.j2"))
    return template.render(
        document=document,
        css=Markup(_read_asset("page.css")),
        vega=Markup(bundle_vega() if document.figures else ""),
        script=Markup(_read_asset("page.js")),
        kind=lambda content: type(content).__name__,
        number=lambda content: numbers[type(content).__name__, content.name],
        spec=_figure_spec,
        static=_static_figure,
        classes=_class_attribute,
        value=_value_attribute,
    )


def _figure_spec(figure: Figure) -> "Markup":
    """Return a figure's specification as JSON that is safe inside a ``script`` element."""
    from markupsafe import Markup

    spec = round_to_shared_digits(vega_lite_spec(figure.plot, figure.is_half))
    text = json.dumps(spec, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _static_figure(figure: Figure) -> str:
    """Return a figure as the address of an SVG image."""
    from base64 import b64encode

    from kvlab.report.figures.axes import render_static_svg

    svg = render_static_svg(figure.plot, figure.name)
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


def _class_attribute(numeric: bool, cell: Cell) -> "Markup":
    from markupsafe import Markup

    classes = (("n", numeric), ("none", cell.value is None), (cell.tone, bool(cell.tone)))
    names = " ".join(name for name, applies in classes if applies)
    return Markup(' class="{}"').format(names) if names else Markup("")


def _value_attribute(cell: Cell) -> "Markup":
    """Return what a column of numbers is sorted by, and exact bytes for the switch of units."""
    from markupsafe import Markup

    size = Markup("") if cell.bytes is None else Markup(' data-bytes="{}"').format(cell.bytes)
    if isinstance(cell.value, bool) or not isinstance(cell.value, int | float):
        return size
    return Markup(' data-v="{}"').format(repr(round_to_shared_digits(cell.value))) + size


def _printable(value: object) -> object:
    from markupsafe import Markup, escape

    return value if isinstance(value, Markup) else escape(sanitize_text(str(value)))


@cache
def _read_asset(name: str) -> str:
    return (files("kvlab.report") / "page" / name).read_text(encoding="utf-8")
