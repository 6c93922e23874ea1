"""Render a report as one self-contained HTML page: style, scripts and figures are inside.

Every value is escaped by Jinja. Only the figures, SVG in which matplotlib and
`kvlab.report.figures.svg` escape every text, and this package's style sheet and script are inserted
as they are. Without scripts a reader sees all of it; the script sorts, filters and selects.
"""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from kvlab.humanize import sanitize_text
from kvlab.report.document import Cell, Document, Figure
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
        script=Markup(_read_asset("page.js")),
        kind=lambda content: type(content).__name__,
        number=lambda content: numbers[type(content).__name__, content.name],
        inline=_inline_figure,
        classes=_class_attribute,
        value=_value_attribute,
    )


def _inline_figure(figure: Figure) -> "Markup":
    from markupsafe import Markup

    from kvlab.report.figures.svg import render_inline_svg

    return Markup(render_inline_svg(figure.plot, figure.name, figure.alt))


def _class_attribute(numeric: bool, cell: Cell) -> "Markup":
    from markupsafe import Markup

    classes = (("n", numeric), ("none", cell.value is None), (cell.tone, bool(cell.tone)))
    names = " ".join(name for name, applies in classes if applies)
    return Markup(' class="{}"').format(names) if names else Markup("")


def _value_attribute(cell: Cell) -> "Markup":
    """Return what a column of numbers is sorted by."""
    from markupsafe import Markup

    if isinstance(cell.value, bool) or not isinstance(cell.value, int | float):
        return Markup("")
    return Markup(' data-v="{}"').format(repr(round_to_shared_digits(cell.value)))


def _printable(value: object) -> object:
    from markupsafe import Markup, escape

    return value if isinstance(value, Markup) else escape(sanitize_text(str(value)))


@cache
def _read_asset(name: str) -> str:
    return (files("kvlab.report") / "page" / name).read_text(encoding="utf-8")
