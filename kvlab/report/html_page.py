"""A report as one HTML page that needs nothing else: style, script and figures are inside.

Every value goes through Jinja's escaping; only the figures, which escape their own texts, and
this package's style and script are put in as they are.
"""

from importlib.resources import files

from kvlab.humanize import sanitize_text
from kvlab.report.document import Cell, Document, Figure
from kvlab.report.figures.layout import lay_out_plot

WIDE, NARROW = 880.0, 368.0
"""Widths of a figure: for screens, and for telephones."""


def render_html(document: Document) -> str:
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup, escape

    from kvlab.report.figures.svg import to_svg

    def draw(figure: Figure) -> Markup:
        wide = to_svg(lay_out_plot(figure.plot, WIDE), figure.alt, "wide")
        return wide + Markup("\n") + to_svg(lay_out_plot(figure.plot, NARROW), figure.alt, "narrow")

    def classes(numeric: bool, cell: Cell) -> Markup:
        given = (("n", numeric), ("none", cell.value is None), (cell.tone, bool(cell.tone)))
        names = " ".join(name for name, applies in given if applies)
        return Markup(' class="{}"').format(names) if names else Markup("")

    def value(cell: Cell) -> Markup:
        if isinstance(cell.value, bool) or not isinstance(cell.value, int | float):
            return Markup("")
        return Markup(' data-v="{}"').format(repr(cell.value))

    def printable(found: object) -> object:
        return found if isinstance(found, Markup) else escape(sanitize_text(str(found)))

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        finalize=printable,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    numbers = document.numbers
    template = environment.from_string(_asset("page.html.j2"))
    return template.render(
        document=document,
        css=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        kind=lambda thing: type(thing).__name__,
        number=lambda thing: numbers[type(thing).__name__, thing.name],
        draw=draw,
        classes=classes,
        value=value,
    )


def _asset(name: str) -> str:
    return (files("kvlab.report") / "page" / name).read_text(encoding="utf-8")
