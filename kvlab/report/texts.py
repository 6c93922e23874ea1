"""What sections say: the templates in ``texts.md``, and in those of extensions, filled in."""

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Literal

from kvlab.humanize import format_count
from kvlab.own_extensions import find_files
from kvlab.report.document import Code, Paragraph, Span, Strong

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_STRONG, _CODE = "\x01", "\x02"
"""Stand in templates for ``**`` and backticks, which values may contain as plain text."""


@cache
def read_texts() -> dict[str, str]:
    """Return the sources of the templates by their headings."""
    pages = [files("kvlab.report").joinpath("texts.md"), *find_files("texts.md")]
    joined = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    parts = re.split(r"^## (.+)$", joined, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def make_environment() -> "Environment":
    from jinja2 import Environment, StrictUndefined

    from kvlab.report import formatting
    from kvlab.store.metrics import METRICS

    environment = Environment(undefined=StrictUndefined)
    environment.globals |= {"fmt": formatting, "METRICS": METRICS}
    environment.filters |= {"count": format_count, "f": format}
    return environment


@cache
def _template(name: str) -> "Template":
    source = " ".join(read_texts()[name].split()).replace("**", _STRONG).replace("`", _CODE)
    return make_environment().from_string(source)


def fill(name: str, /, **fields: object) -> str:
    """Return a text with its fields filled in, on one line."""
    return re.sub(r"(?<=\() +| +(?=[ ,;.:)])", "", _template(name).render(fields)).strip(" ")


def spans(name: str, /, **fields: object) -> tuple[Span, ...]:
    """Return a text in which ``**words**`` are strong and words in backticks are code."""
    parts = re.split(f"([{_STRONG}{_CODE}])(.*?)\\1", fill(name, **fields))
    plain, marks, words = parts[::3], parts[1::3], parts[2::3]
    found: list[Span] = [plain[0]]
    for mark, word, text in zip(marks, words, plain[1:], strict=True):
        found += [Strong(word) if mark == _STRONG else Code(word), text]
    return tuple(filter(None, found))


def write(name: str, tone: Literal["", "lead", "muted"] = "", /, **fields: object) -> Paragraph:
    """Return the paragraph of `spans`."""
    return Paragraph(spans(name, **fields), tone)
