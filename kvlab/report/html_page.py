"""Render a report as one self-contained HTML page: style, scripts and figures are inside.

Jinja escapes every value. The figures, SVG in which matplotlib and `kvlab.report.figures`
escape every text, are inserted as they are, and so are this package's style sheet and script.
Without scripts a reader sees all of it; the script sorts, filters and selects.
"""

from importlib.resources import files

from kvlab.humanize import sanitize_text
from kvlab.report.document import Cell, Document, Figure
from kvlab.report.formatting import round_to_shared_digits


def render_html(document: Document) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    from kvlab.report.figures import render_inline_svg

    def printable(value: object) -> object:
        return value if isinstance(value, Markup) else escape(sanitize_text(str(value)))

    def inline(figure: Figure) -> Markup:
        return Markup(render_inline_svg(figure.plot, figure.name, figure.alt))

    def classes(numeric: bool, cell: Cell) -> Markup:
        names = ("n" if numeric else "", "none" if cell.value is None else "", cell.tone)
        text = " ".join(filter(None, names))
        return Markup(' class="{}"').format(text) if text else Markup("")

    def value(cell: Cell) -> Markup:
        """Return what a column of numbers is sorted by."""
        if isinstance(cell.value, bool) or not isinstance(cell.value, int | float):
            return Markup("")
        return Markup(' data-v="{}"').format(repr(round_to_shared_digits(cell.value)))

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        keep_trailing_newline=True,
    )
    page, numbers = files("kvlab.report") / "page", document.numbers
    template = environment.from_string((page / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        document=document,
        css=Markup((page / "page.css").read_text(encoding="utf-8")),
        script=Markup((page / "page.js").read_text(encoding="utf-8")),
        kind=lambda content: type(content).__name__,
        number=lambda content: numbers[type(content).__name__, content.name],
        inline=inline,
        classes=classes,
        value=value,
    )
