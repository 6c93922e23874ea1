"""Tables as LaTeX, for ``\\input`` into a paper. Needs the package booktabs alone.

Every character of a value is literal: nothing in it can be a command. What pdfLaTeX has no
letter for is shown as its code point.
"""

import re

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


def to_latex(table: Table) -> str:
    """One ``tabular``; rows and columns as in the other forms, whatever their number.

    Bold is what the report calls better or worse. The caption stands above it as a comment, to
    be taken over into a ``table`` environment; and for a wide one, how it fits a page.
    """
    kinds = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [
        f"% {escape(table.caption)}",
        f"% Needs \\usepackage{{booktabs}}. {_use(table)}",
        f"\\begin{{tabular}}{{@{{}}{kinds}@{{}}}}",
        r"\toprule",
        _line([escape(column.title) for column in table.columns]),
        r"\midrule",
        *map(_row, table.rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _use(table: Table) -> str:
    plain = f"\\input{{{table.name}.tex}}"
    if len(table.columns) <= MOST_COLUMNS:
        return plain
    return f"To page width, with graphicx: \\resizebox{{\\textwidth}}{{!}}{{{plain}}}"


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
