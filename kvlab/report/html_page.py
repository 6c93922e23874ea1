"""Render a report as one self-contained HTML page: style, scripts and figures are inside.

Every value is escaped by Jinja. Only the specifications of the figures, which are JSON with escaped
brackets, and this package's style sheet and scripts are inserted as they are. Figures are drawn by
Vega, which is part of the page; without scripts a reader sees matplotlib's static figures.
"""

import json
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING

from kvlab.humanize import sanitize_text
from kvlab.report.document import Cell, Document, Figure

if TYPE_CHECKING:
    from markupsafe import Markup

VEGA_LITE_VERSION = "6.4"


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


@cache
def bundle_vega() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script that sets ``vegaEmbed``.

    The bundle comes out of the package vl-convert-python and takes seconds to make, so it is kept
    in the user's cache folder.
    """
    from platformdirs import user_cache_path

    from kvlab.fs.atomic_files import write_atomic

    release = version("vl-convert-python")
    path = user_cache_path("kvlab") / f"vega-{release}-{VEGA_LITE_VERSION}.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        script = _make_bundle()
    with suppress(OSError):  # else it is made again the next time
        write_atomic(path, script)
    return script


def _make_bundle() -> str:
    import vl_convert

    script = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", VEGA_LITE_VERSION)
    licence = _read_asset("VEGA_LICENSE.txt")
    return f"/*\n{licence}*/\n(function () {{\n{script}\n}})();"


def _figure_spec(figure: Figure) -> "Markup":
    """Return a figure's specification as JSON that is safe inside a ``script`` element."""
    from markupsafe import Markup

    from kvlab.report.figures.vega_lite import vega_lite_spec

    text = json.dumps(vega_lite_spec(figure.plot, figure.is_half), separators=(",", ":"))
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
    return Markup(' data-v="{}"').format(repr(cell.value)) + size


def _printable(value: object) -> object:
    from markupsafe import Markup, escape

    return value if isinstance(value, Markup) else escape(sanitize_text(str(value)))


@cache
def _read_asset(name: str) -> str:
    return (files("kvlab.report") / "page" / name).read_text(encoding="utf-8")
