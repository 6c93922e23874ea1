"""Tables as LaTeX, for ``\\input`` into a paper, with caption and label. Needs booktabs; a wide
one graphicx too, and one of several pages longtable.

Every character of a value is literal: nothing in it can be a command. What pdfLaTeX has no
letter for is shown as its code point.
"""

import re
from collections.abc import Iterator

from kvlab.report.section import Cell, Row, Table
from kvlab.text import one_line

_ESCAPED = {
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

_TOKEN = re.compile("-(?=-)|,(?=,)|[^-, 0-9A-Za-z.:;()=+/@?!]")
_LETTERS = re.compile("(?![\u00d7\u00f7\u017fÐÞðþĄąĐđĘęĦħĮįĸĿŀŉŊŋŦŧŲų])[\u00c0-\u017f]")
"""Latin letters with accents that LaTeX sets in its default encoding."""

MOST_COLUMNS = 7
"""That fit the width of a page as they are."""

MOST_ROWS = 40
"""That fit a page."""


def to_latex(table: Table) -> str:
    """One floating ``table``; one longer than a page is a ``longtable``.

    Rows and columns are as in the other forms, whatever their number. Bold is what the report
    calls better or worse. Its label is ``tab:`` and the table's name; what the heads mean stands
    under it.
    """
    long, wide = len(table.rows) > MOST_ROWS, len(table.columns) > MOST_COLUMNS
    packages = ["booktabs", *(["longtable"] if long else ["graphicx"] if wide else [])]
    uses = f"% Needs \\usepackage{{{','.join(packages)}}}. \\input{{{table.name}.tex}}"
    lines = [uses, *(_long(table, wide) if long else _floating(table, wide))]
    return "\n".join(lines) + "\n"


def _floating(table: Table, wide: bool) -> Iterator[str]:
    yield r"\begin{table}[tbp]"
    yield r"\centering"
    yield f"\\caption{{{escape(table.caption)}}}"
    yield f"\\label{{tab:{table.name}}}"
    if wide:
        yield r"\resizebox{\textwidth}{!}{%"
    yield f"\\begin{{tabular}}{{{_kinds(table)}}}"
    yield r"\toprule"
    yield _heads(table)
    yield r"\midrule"
    yield from map(_row, table.rows)
    yield r"\bottomrule"
    yield r"\end{tabular}"
    if wide:
        yield "}"
    yield from _legend(table)
    yield r"\end{table}"


def _long(table: Table, wide: bool) -> Iterator[str]:
    """The head again on every page; a wide one in small print, since it cannot be scaled."""
    yield r"\begingroup"
    if wide:
        yield r"\tiny\setlength{\tabcolsep}{2pt}"
    yield f"\\begin{{longtable}}{{{_kinds(table)}}}"
    yield f"\\caption{{{escape(table.caption)}}}\\label{{tab:{table.name}}}\\tabularnewline"
    yield r"\toprule"
    yield _heads(table)
    yield r"\midrule"
    yield r"\endhead"
    yield r"\bottomrule"
    yield r"\endfoot"
    yield from map(_row, table.rows)
    yield r"\end{longtable}"
    yield from _legend(table)
    yield r"\endgroup"


def _kinds(table: Table) -> str:
    return "@{}" + "".join("r" if one.numeric else "l" for one in table.columns) + "@{}"


def _heads(table: Table) -> str:
    return _line([escape(column.title) for column in table.columns])


def _legend(table: Table) -> Iterator[str]:
    if table.legend:
        noted = (f"\\emph{{{escape(one.title)}}}: {escape(one.hint)}" for one in table.legend)
        yield f"\\par\\smallskip{{\\footnotesize\\raggedright {'; '.join(noted)}.\\par}}"


def escape(text: str) -> str:
    """``text`` as LaTeX that shows it literally, on one line."""
    return _TOKEN.sub(_escape, one_line(text))


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if character in _ESCAPED:
        return _ESCAPED[character]
    if _LETTERS.match(character):
        return character
    return f"\\texttt{{U+{ord(character):04X}}}"


def _row(row: Row) -> str:
    return _line([_cell(cell) for cell in row.cells])


def _line(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: Cell) -> str:
    text = escape(cell.text)
    if cell.code and text:
        return f"\\texttt{{{text}}}"
    return f"\\textbf{{{text}}}" if cell.tone in ("good", "bad") and text else text
