"""Export tables as CSV (numbers of 12 digits) and as LaTeX (for ``\\input`` into a paper).

LaTeX tables have a caption and a label; their first line names the packages that they need. Every
character of a value is literal: nothing in it can be a command. A character that pdfLaTeX cannot
set is shown as its code point. The templates are in `kvlab/report/latex/`.
"""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from kvlab.humanize import sanitize_line, sanitize_text
from kvlab.report.document import Cell, Scalar, Table
from kvlab.report.formatting import round_to_shared_digits

COLUMN_WIDTH = 3.25
"""Inches of a column in a page of two, as in the styles of ICML."""

MAX_PAGE_COLUMNS = 7
"""Columns of a long table that fit the width of a page in text of the normal size."""

MAX_PAGE_ROWS = 40
"""Rows that fit a page."""


def table_to_csv(table: Table) -> str:
    """Return a table as CSV (RFC 4180, with ``\\n``).

    A column whose cells hold several numbers, such as a mean and its spread, becomes several. Text
    that a spreadsheet would run as a formula is prefixed by a quote.
    """
    titles = [column.csv or (column.title,) for column in table.columns]
    rows = []
    for row in table.rows:
        values: list[Scalar] = []
        for names, cell in zip(titles, row.cells, strict=True):
            empty = (None,) * len(names)
            found: Sequence[Scalar] = cell.csv or (empty if cell.value is None else (cell.value,))
            assert len(found) == len(names), f"{names}: {len(found)} values"
            values += map(round_to_shared_digits, found)
        rows.append(values)
    return write_csv([name for names in titles for name in names], rows)


def write_csv(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Return CSV; None is empty, and what is no number and no text is JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_guard_formula, names))
    writer.writerows(map(_guard_formula, row) for row in rows)
    return out.getvalue()


def _guard_formula(value: Any) -> Any:
    """Return what a spreadsheet takes as text or as a number, not as a formula."""
    if value is None or isinstance(value, int | float):
        return value
    text = sanitize_text(value if isinstance(value, str) else json.dumps(value))
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\n") else text


# LaTeX


class _TexTemplate(Template):
    """A template whose fields are ``!!name`` or ``!!{name}``: dollars are LaTeX's own."""

    delimiter = "!!"
    idpattern = "(?a:[a-z_]+)"
    braceidpattern = "(?a:[a-z0-9_.]+)"


def read_latex(name: str) -> str:
    return (files("kvlab.report") / "latex" / name).read_text("utf-8")


def fill_latex(template: str, fields: Mapping[str, str]) -> str:
    """Fill a template.

    Raises:
        KeyError: It names a field that has no value.
    """
    return _TexTemplate(template).substitute(fields)


def escape_latex(text: str) -> str:
    """Return LaTeX that shows ``text`` literally, on one line."""

    def escape(match: re.Match[str]) -> str:
        unknown = f"\\texttt{{U+{ord(match[0]):04X}}}"
        return match[0] if _LATEX_LETTERS.match(match[0]) else _LATEX_ESCAPES.get(match[0], unknown)

    return _LATEX_SPECIAL.sub(escape, sanitize_line(text))


def escape_prose(text: str) -> str:
    """Escape a sentence; its apostrophes stay apostrophes."""
    return escape_latex(text).replace("\\textquotesingle{}", "'")


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


def table_to_latex(table: Table, name: str = "", width: float | None = None) -> str:
    """Return a table as a float, or as a ``longtable`` if it is longer than a page.

    Cells that the report calls better or worse are bold. The label is ``tab:`` and the name; the
    hints of the columns stand under the table.

    Args:
        name: Name for the label. Default: that of the table.
        width: Inches of a paper's table, whose float spans both columns above `COLUMN_WIDTH`. By
            default it is for a page of one column.
    """
    table = table.shown
    is_long = width is None and len(table.rows) > MAX_PAGE_ROWS
    hints = [f"\\emph{{{escape_latex(c.title)}}}: {escape_latex(c.hint)}" for c in table.legend]
    legend = f"\\par\\smallskip{{\\footnotesize\\raggedright {'; '.join(hints)}.\\par}}"
    is_narrow = width is not None and width <= COLUMN_WIDTH
    fields = {
        "file": f"{table.name}.tex",
        "name": name or table.name,
        "caption": escape_prose(table.caption),
        "alignment": f"@{{}}{''.join('r' if c.numeric else 'l' for c in table.columns)}@{{}}",
        "heads": _latex_line(escape_latex(column.title) for column in table.columns),
        "rows": "\n".join(_latex_line(map(_latex_cell, row.cells)) for row in table.rows),
        "legend": legend if hints else "%",
        "star": "" if width is None or is_narrow else "*",
        "line": "\\columnwidth" if is_narrow else "\\textwidth",
        "size": "\\tiny\\setlength{\\tabcolsep}{2pt}" * (len(table.columns) > MAX_PAGE_COLUMNS),
    }
    return fill_latex(read_latex("longtable.tex" if is_long else "table.tex"), fields)


def _latex_line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Cell) -> str:
    text = escape_latex(cell.text)
    if cell.code and text:
        return f"\\texttt{{{text}}}"
    return f"\\textbf{{{text}}}" if cell.tone in ("good", "bad") and text else text
