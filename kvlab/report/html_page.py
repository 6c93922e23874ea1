"""Render a report as one self-contained HTML page: style, script and figures are inside.

Every value is escaped by Jinja. Only the figures, which escape their own texts, and this package's
style sheet and script are inserted as they are.
"""

from importlib.resources import files
from typing import TYPE_CHECKING

from kvlab.humanize import sanitize_text
from kvlab.report.document import Cell, Document, Figure

if TYPE_CHECKING:
    from markupsafe import Markup

WIDE, NARROW = 880.0, 368.0
"""Widths of a figure in pixels, for screens and for telephones."""


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
        draw=_draw_figure,
        classes=_class_attribute,
        value=_value_attribute,
    )


def _draw_figure(figure: Figure) -> "Markup":
    from markupsafe import Markup

    from kvlab.report.figures.inline_svg import render_inline_svg

    wide = render_inline_svg(figure.plot, WIDE, figure.alt, "wide")
    return wide + Markup("\n") + render_inline_svg(figure.plot, NARROW, figure.alt, "narrow")


def _class_attribute(numeric: bool, cell: Cell) -> "Markup":
    from markupsafe import Markup

    classes = (("n", numeric), ("none", cell.value is None), (cell.tone, bool(cell.tone)))
    names = " ".join(name for name, applies in classes if applies)
    return Markup(' class="{}"').format(names) if names else Markup("")


def _value_attribute(cell: Cell) -> "Markup":
    """Return the attribute that a column of numbers is sorted by."""
    from markupsafe import Markup

    if isinstance(cell.value, bool) or not isinstance(cell.value, int | float):
        return Markup("")
    return Markup(' data-v="{}"').format(repr(cell.value))


def _printable(value: object) -> object:
    from markupsafe import Markup, escape

    return value if isinstance(value, Markup) else escape(sanitize_text(str(value)))


def _read_asset(name: str) -> str:
    return (files("kvlab.report") / "page" / name).read_text(encoding="utf-8")
