"""Export tables as CSV (numbers of 12 digits) and as LaTeX (for ``\\input`` into a paper).

LaTeX tables have a caption and a label and need the packages booktabs, graphicx (wide tables) and
longtable (long tables). Every character of a value is literal: nothing in it can be a command. A
character that pdfLaTeX cannot set is shown as its code point.
"""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.document import Cell, Column, Row, Scalar, Table
from kvlab.report.formatting import round_to_shared_digits


def table_to_csv(table: Table) -> str:
    """Return a table as CSV (RFC 4180, with ``\\n``).

    A column whose cells hold several numbers, such as a mean and its spread, becomes several. Text
    that a spreadsheet would run as a formula is prefixed by a quote.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [_guard_formula(name) for column in table.columns for name in _csv_titles(column)]
    )
    for row in table.rows:
        pairs = zip(table.columns, row.cells, strict=True)
        values = [value for one in pairs for value in _csv_values(*one)]
        writer.writerow([_csv_scalar(round_to_shared_digits(value)) for value in values])
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
    """Return flat objects as CSV; missing and null values are empty."""
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
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\n") else text


_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%",
    "#": r"\#", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"{\char34}",
    "'": r"\textquotesingle{}", "`": r"\textasciigrave{}",
    # Two dashes or commas form a ligature; a line break takes a star or bracket as its argument.
    "-": "{-}", ",": "{,}", "[": "{[}", "]": "{]}", "*": "{*}",
    "\N{MINUS SIGN}": "$-$", "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{MULTIPLICATION SIGN}": r"$\times$", "\N{EN DASH}": r"\textendash{}",
    "\N{EM DASH}": r"\textemdash{}", "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{NO-BREAK SPACE}": "~",
}  # fmt: skip

_LATEX_SPECIAL = re.compile("-(?=-)|,(?=,)|[^-, 0-9A-Za-z.:;()=+/@?!]")
_LATEX_LETTERS = re.compile("(?![\u00d7\u00f7\u017fÐÞðþĄąĐđĘęĦħĮįĸĿŀŉŊŋŦŧŲų])[\u00c0-\u017f]")
"""Accented Latin letters that LaTeX sets in its default encoding."""

MAX_PAGE_COLUMNS = 7
"""Columns that fit the width of a page without scaling."""

MAX_PAGE_ROWS = 40
"""Rows that fit a page."""


def table_to_latex(table: Table) -> str:
    """Return a table as a ``table`` float, or as a ``longtable`` if it is longer than a page.

    Cells that the report calls better or worse are bold. The label is ``tab:`` and the table's
    name; the hints of the columns stand under the table.
    """
    table = table.shown
    is_long, is_wide = len(table.rows) > MAX_PAGE_ROWS, len(table.columns) > MAX_PAGE_COLUMNS
    packages = ["booktabs", *(["longtable"] if is_long else ["graphicx"] if is_wide else [])]
    uses = f"% Needs \\usepackage{{{','.join(packages)}}}. \\input{{{table.name}.tex}}"
    lines = [uses, *(_longtable(table, is_wide) if is_long else _table_float(table, is_wide))]
    return "\n".join(lines) + "\n"


def _table_float(table: Table, is_wide: bool) -> Iterator[str]:
    yield r"\begin{table}[tbp]"
    yield r"\centering"
    yield f"\\caption{{{escape_latex(table.caption)}}}"
    yield f"\\label{{tab:{table.name}}}"
    if is_wide:
        yield r"\resizebox{\textwidth}{!}{%"
    yield from latex_tabular(table)
    if is_wide:
        yield "}"
    yield from latex_legend(table)
    yield r"\end{table}"


def latex_tabular(table: Table) -> Iterator[str]:
    """Yield the lines of a table with booktabs rules, without its float."""
    yield f"\\begin{{tabular}}{{{_column_alignment(table)}}}"
    yield r"\toprule"
    yield _latex_heads(table)
    yield r"\midrule"
    yield from map(_latex_row, table.rows)
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _longtable(table: Table, is_wide: bool) -> Iterator[str]:
    """Yield a table that repeats its head on every page; a wide one is small, not scaled."""
    yield r"\begingroup"
    if is_wide:
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
    yield from latex_legend(table)
    yield r"\endgroup"


def _column_alignment(table: Table) -> str:
    return "@{}" + "".join("r" if one.numeric else "l" for one in table.columns) + "@{}"


def _latex_heads(table: Table) -> str:
    return _latex_line([escape_latex(column.title) for column in table.columns])


def latex_legend(table: Table) -> Iterator[str]:
    """Yield the hints of the columns, if there are any."""
    if table.legend:
        noted = (
            f"\\emph{{{escape_latex(one.title)}}}: {escape_latex(one.hint)}" for one in table.legend
        )
        yield f"\\par\\smallskip{{\\footnotesize\\raggedright {'; '.join(noted)}.\\par}}"


def escape_latex(text: str) -> str:
    """Return LaTeX that shows ``text`` literally, on one line."""
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
