"""Render a report as Markdown for code hosts. Every character of a value is literal."""

import html
import re
from collections.abc import Iterable, Mapping

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report import document as doc

MAX_TABLE_ROWS = 60
"""Rows of a table in Markdown; the CSV and the HTML page have all of them."""

_FORMS = (
    "[The interactive page](report.html) has the same content with sortable tables and hover"
    " values. Beside it are [every trial as CSV](results.csv) and [the tables as CSV and"
    " LaTeX](tables)."
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~$@^])")
_START = re.compile(r"^(\d*)([-+=.)])(?=[\s=-]|$)")
_LINK = re.compile(r"(?i)\b(https?|ftp|mailto|www)([:.])")


def render_markdown(document: doc.Document) -> str:
    numbers = document.numbers
    parts = [f"# {escape_markdown(document.title)}"]
    for number, section in enumerate(document.main.values()):
        parts.append(f"## {escape_markdown(section.title)}")
        parts += [_content(content, numbers) for content in section.contents]
        if number == 0:
            parts.append(_FORMS)
    if document.appendix:
        parts.append("## Appendix")
    folds = (doc.Fold(one.title, one.contents) for one in document.appendix.values())
    parts += [_content(fold, numbers) for fold in folds]
    return "\n\n".join(parts) + "\n"


def _details(title: str, inside: str) -> str:
    summary = html.escape(sanitize_line(title))
    return f"<details><summary>{summary}</summary>\n\n{inside}\n\n</details>"


def _fence(text: str, shortest: int) -> str:
    """Return more backticks than any run of them in a text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    return "`" * max(shortest, longest + 1)


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
    fence = _fence(text, 1)
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    return span.replace("|", "\\|") if in_table else span


def _content(content: doc.Content, numbers: Mapping[tuple[str, str], str]) -> str:
    match content:
        case doc.Paragraph(spans):
            return _spans(spans)
        case doc.Bullets(items):
            return "\n".join(f"- {_spans(item)}" for item in items)
        case doc.Heading(text):
            return f"### {escape_markdown(text)}"
        case doc.Block(title, text, language):
            text = "\n".join(map(sanitize_text, text.rstrip("\n").split("\n")))
            fence = _fence(text, 3)
            return _details(title, f"{fence}{language}\n{text}\n{fence}")
        case doc.Fold(title, contents):
            return _details(title, "\n\n".join(_content(one, numbers) for one in contents))
        case doc.Table():
            return _table(content.shown, numbers["Table", content.name])
        case doc.Figure():
            image = f"![{escape_markdown(content.alt)}](figures/{content.name}.svg)"
            caption = _escape_inline(content.caption)
            return f"{image}\n\n*{numbers['Figure', content.name]}. {caption}*"


def _spans(spans: Iterable[doc.Span]) -> str:
    parts = []
    for span in spans:
        match span:
            case doc.Code(text):
                parts.append(code_span(text))
            case doc.Strong(text):
                parts.append(f"**{escape_markdown(text)}**")
            case _:
                parts.append(_escape_inline(span))
    return _escape_line_start(re.sub(r" +", " ", "".join(parts)).strip())


def _table(table: doc.Table, number: str) -> str:
    def cell_text(one: doc.Cell) -> str:
        text = code_span(one.text, in_table=True) if one.code else escape_markdown(one.text)
        return f"**{text}**" if one.tone in ("good", "bad") and text and not one.code else text

    rows = [map(cell_text, row.cells) for row in table.rows[:MAX_TABLE_ROWS]]
    n_hidden = len(table.rows) - len(rows)
    more = f" {n_hidden:,} more rows are in the CSV." if n_hidden else ""
    where = f"[CSV](tables/{table.name}.csv) [LaTeX](tables/{table.name}.tex)"
    heads = (escape_markdown(column.title) for column in table.columns)
    lines = [f"*{number}. {_escape_inline(table.caption)}*{more} {where}", ""]
    lines.append(f"| {' | '.join(heads)} |")
    lines.append(f"|{'|'.join(' --: ' if c.numeric else ' :-- ' for c in table.columns)}|")
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if table.legend:
        hints = (f"*{_escape_inline(c.title)}*: {_escape_inline(c.hint)}" for c in table.legend)
        lines += ["", f"Columns: {'; '.join(hints)}."]
    return "\n".join(lines)
