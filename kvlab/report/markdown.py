"""Render a report as Markdown for code hosts. Every character of a value is literal."""

import html
import re
from collections.abc import Iterable, Mapping

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.document import (
    Block,
    Bullets,
    Cell,
    Code,
    Content,
    Document,
    Figure,
    Fold,
    Heading,
    Paragraph,
    Row,
    Span,
    Strong,
    Table,
)

MAX_TABLE_ROWS = 60
"""Rows of a table in Markdown; the CSV and the HTML page have all of them."""

_FORMS = (
    "[The interactive page](report.html) has the same content with sortable tables and hover"
    " values. Beside it are every trial as [JSON](results.jsonl) and [CSV](results.csv), and"
    " [the tables as CSV and LaTeX](tables)."
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~$@^])")
_START = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
_LINK = re.compile(r"(?i)\b(https?|ftp|mailto|www)([:.])")


def render_markdown(document: Document) -> str:
    numbers = document.numbers
    parts = [f"# {escape_markdown(document.title)}"]
    for number, section in enumerate(document.main.values()):
        parts.append(f"## {escape_markdown(section.title)}")
        parts += [_content(content, numbers) for content in section.contents]
        if number == 0:
            parts.append(_FORMS)
    if document.appendix:
        parts.append("## Appendix")
    parts += [_folded(one.title, one.contents, numbers) for one in document.appendix.values()]
    return "\n\n".join(parts) + "\n"


def _folded(title: str, contents: Iterable[Content], numbers: Mapping[tuple[str, str], str]) -> str:
    inside = "\n\n".join(_content(content, numbers) for content in contents)
    summary = html.escape(sanitize_line(title))
    return f"<details><summary>{summary}</summary>\n\n{inside}\n\n</details>"


def escape_markdown(text: str) -> str:
    """Return Markdown that shows ``text`` literally, on one line."""
    return _escape_line_start(_escape_inline(text.strip()))


def _escape_inline(text: str) -> str:
    """Escape text inside a line; white space at its ends stays."""
    text = sanitize_text(re.sub(r"\s+", " ", text)).replace("&", "&amp;")
    # Code hosts make links of bare addresses, unless told not to.
    return _LINK.sub(r"\1\\\2", _SPECIAL.sub(r"\\\1", text))


def _escape_line_start(line: str) -> str:
    """Escape the start of a line that would begin a list or a heading."""
    return _START.sub(r"\1\\\2", line)


def code_span(text: str, in_table: bool = False) -> str:
    """Return ``text`` as a code span, whatever backticks it contains."""
    text = sanitize_line(text)
    if not text:
        return ""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    return span.replace("|", "\\|") if in_table else span


def _content(content: Content, numbers: Mapping[tuple[str, str], str]) -> str:
    match content:
        case Paragraph(spans):
            return _spans(spans)
        case Bullets(items):
            return "\n".join(f"- {_spans(item)}" for item in items)
        case Heading(text):
            return f"### {escape_markdown(text)}"
        case Block():
            return _block(content)
        case Fold(title, contents):
            return _folded(title, contents, numbers)
        case Table():
            return _table(content.shown, numbers["Table", content.name])
        case Figure():
            return _figure(content, numbers["Figure", content.name])


def _spans(spans: Iterable[Span]) -> str:
    parts = []
    for span in spans:
        match span:
            case Code(text):
                parts.append(code_span(text))
            case Strong(text):
                parts.append(f"**{escape_markdown(text)}**")
            case _:
                parts.append(_escape_inline(span))
    return _escape_line_start(re.sub(r" +", " ", "".join(parts)).strip())


def _block(block: Block) -> str:
    text = "\n".join(map(sanitize_text, block.text.rstrip("\n").split("\n")))
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    summary = html.escape(sanitize_line(block.title))
    return (
        f"<details><summary>{summary}</summary>\n\n{fence}{block.language}\n{text}\n{fence}\n\n"
        "</details>"
    )


def _table(table: Table, number: str) -> str:
    head = "| " + " | ".join(escape_markdown(column.title) for column in table.columns) + " |"
    rule = "|" + "|".join(" --: " if column.numeric else " :-- " for column in table.columns) + "|"
    rows = [_row(row) for row in table.rows[:MAX_TABLE_ROWS]]
    where = f"[CSV](tables/{table.name}.csv) [LaTeX](tables/{table.name}.tex)"
    n_hidden = len(table.rows) - len(rows)
    more = f" {n_hidden:,} more rows are in the CSV." if n_hidden else ""
    caption = f"*{number}. {_escape_inline(table.caption)}*{more} {where}"
    legend = ["", _legend(table)] if table.legend else []
    return "\n".join([caption, "", head, rule, *rows, *legend])


def _legend(table: Table) -> str:
    """Return the hints of the columns."""
    hints = (f"*{_escape_inline(one.title)}*: {_escape_inline(one.hint)}" for one in table.legend)
    return "Columns: " + "; ".join(hints) + "."


def _row(row: Row) -> str:
    return "| " + " | ".join(map(_cell, row.cells)) + " |"


def _cell(cell: Cell) -> str:
    text = code_span(cell.text, in_table=True) if cell.code else escape_markdown(cell.text)
    return f"**{text}**" if cell.tone in ("good", "bad") and text and not cell.code else text


def _figure(figure: Figure, number: str) -> str:
    alt = escape_markdown(figure.alt)
    image = f"![{alt}](figures/{figure.name}.svg)"
    png = f"[PNG](figures/{figure.name}.png)"
    return f"{image}\n\n*{number}. {_escape_inline(figure.caption)}* {png}"
