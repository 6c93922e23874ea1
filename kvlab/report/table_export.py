"""Tables as CSV: the numbers themselves, unrounded."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.document import Cell, Column, Row, Scalar, Table


def table_to_csv(table: Table) -> str:
    """RFC 4180 with ``\\n``; text that a spreadsheet would run as a formula gets a quote first.

    A column whose cells hold several numbers, such as a mean and its spread, becomes several.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [_guard_formula(name) for column in table.columns for name in _csv_titles(column)]
    )
    for row in table.rows:
        pairs = zip(table.columns, row.cells, strict=True)
        writer.writerow([_csv_scalar(value) for one in pairs for value in _csv_values(*one)])
    return out.getvalue()


def _csv_titles(column: Column) -> tuple[str, ...]:
    return column.csv or (column.title,)


def _csv_values(column: Column, cell: Cell) -> tuple[Scalar, ...]:
    names = _csv_titles(column)
    if not cell.csv and cell.value is None:
        return (None,) * len(names)
    values = cell.csv or (cell.value,)
    assert len(values) == len(names), f"{column.title}: {len(values)} values, {len(names)} columns"
    return values


def rows_to_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Flat objects as CSV with these columns; a missing or null value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_guard_formula(name) for name in names])
    for row in rows:
        writer.writerow([_csv_scalar(row.get(name)) for name in names])
    return out.getvalue()


def _csv_scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, int | float):
        return value
    return _guard_formula(value if isinstance(value, str) else json.dumps(value))


def _guard_formula(text: str) -> str:
    text = sanitize_text(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text


# Tables as LaTeX, for ``\input`` into a paper, with caption and label. Needs booktabs; a wide
# one graphicx too, and one of several pages longtable.
#
# Every character of a value is literal: nothing in it can be a command. What pdfLaTeX has no
# letter for is shown as its code point.


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%",
    "#": r"\#", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"{\char34}",
    "'": r"\textquotesingle{}", "`": r"\textasciigrave{}",
    # Two dashes or commas would join; a line's end would take a star or bracket for its own.
    "-": "{-}", ",": "{,}", "[": "{[}", "]": "{]}", "*": "{*}",
    "\N{MINUS SIGN}": "$-$", "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$", "\N{EN DASH}": r"\textendash{}",
    "\N{EM DASH}": r"\textemdash{}", "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{NO-BREAK SPACE}": "~",
}  # fmt: skip

_LATEX_SPECIAL = re.compile("-(?=-)|,(?=,)|[^-, 0-9A-Za-z.:;()=+/@?!]")
_LATEX_LETTERS = re.compile("(?![\u00d7\u00f7\u017fÐÞðþĄąĐđĘęĦħĮįĸĿŀŉŊŋŦŧŲų])[\u00c0-\u017f]")
"""Latin letters with accents that LaTeX sets in its default encoding."""

MAX_PAGE_COLUMNS = 7
"""That fit the width of a page as they are."""

MAX_PAGE_ROWS = 40
"""That fit a page."""


def table_to_latex(table: Table) -> str:
    """One floating ``table``; one longer than a page is a ``longtable``.

    Rows and columns are as in the other forms, whatever their number. Bold is what the report
    calls better or worse. Its label is ``tab:`` and the table's name; what the heads mean stands
    under it.
    """
    long, wide = len(table.rows) > MAX_PAGE_ROWS, len(table.columns) > MAX_PAGE_COLUMNS
    packages = ["booktabs", *(["longtable"] if long else ["graphicx"] if wide else [])]
    uses = f"% Needs \\usepackage{{{','.join(packages)}}}. \\input{{{table.name}.tex}}"
    lines = [uses, *(_longtable(table, wide) if long else _table_float(table, wide))]
    return "\n".join(lines) + "\n"


def _table_float(table: Table, wide: bool) -> Iterator[str]:
    yield r"\begin{table}[tbp]"
    yield r"\centering"
    yield f"\\caption{{{escape_latex(table.caption)}}}"
    yield f"\\label{{tab:{table.name}}}"
    if wide:
        yield r"\resizebox{\textwidth}{!}{%"
    yield f"\\begin{{tabular}}{{{_column_alignment(table)}}}"
    yield r"\toprule"
    yield _latex_heads(table)
    yield r"\midrule"
    yield from map(_latex_row, table.rows)
    yield r"\bottomrule"
    yield r"\end{tabular}"
    if wide:
        yield "}"
    yield from _latex_legend(table)
    yield r"\end{table}"


def _longtable(table: Table, wide: bool) -> Iterator[str]:
    """The head again on every page; a wide one in small print, since it cannot be scaled."""
    yield r"\begingroup"
    if wide:
        yield r"\tiny\setlength{\tabcolsep}{2pt}"
    yield f"\\begin{{longtable}}{{{_column_alignment(table)}}}"
    yield f"\\caption{{{escape_latex(table.caption)}}}\\label{{tab:{table.name}}}\\tabularnewline"
    yield r"\toprule"
    yield _latex_heads(table)
    yield r"\midrule"
    yield r"\endhead"
    yield r"\bottomrule"
    yield r"\endfoot"
    yield from map(_latex_row, table.rows)
    yield r"\end{longtable}"
    yield from _latex_legend(table)
    yield r"\endgroup"


def _column_alignment(table: Table) -> str:
    return "@{}" + "".join("r" if one.numeric else "l" for one in table.columns) + "@{}"


def _latex_heads(table: Table) -> str:
    return _latex_line([escape_latex(column.title) for column in table.columns])


def _latex_legend(table: Table) -> Iterator[str]:
    if table.legend:
        noted = (
            f"\\emph{{{escape_latex(one.title)}}}: {escape_latex(one.hint)}" for one in table.legend
        )
        yield f"\\par\\smallskip{{\\footnotesize\\raggedright {'; '.join(noted)}.\\par}}"


def escape_latex(text: str) -> str:
    """``text`` as LaTeX that shows it literally, on one line."""
    return _LATEX_SPECIAL.sub(_escape_character, sanitize_line(text))


def _escape_character(match: re.Match[str]) -> str:
    character = match[0]
    if character in _LATEX_ESCAPES:
        return _LATEX_ESCAPES[character]
    if _LATEX_LETTERS.match(character):
        return character
    return f"\\texttt{{U+{ord(character):04X}}}"


def _latex_row(row: Row) -> str:
    return _latex_line([_latex_cell(cell) for cell in row.cells])


def _latex_line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    if cell.code and text:
        return f"\\texttt{{{text}}}"
    return f"\\textbf{{{text}}}" if cell.tone in ("good", "bad") and text else text
