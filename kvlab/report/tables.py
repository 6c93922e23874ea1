"""Tables as CSV: the numbers themselves, unrounded."""

import csv
import io

from kvlab.report.section import Cell, Scalar, Table
from kvlab.report.text import visible


def to_csv(table: Table) -> str:
    """RFC 4180 with ``\\n``; text that a spreadsheet would run as a formula gets a quote first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_safe(column.title) for column in table.columns])
    for row in table.rows:
        writer.writerow([_value(cell) for cell in row.cells])
    return out.getvalue()


def _value(cell: Cell) -> Scalar:
    # An interval is sorted by its width, but read as its ends.
    if isinstance(cell.value, str) or not _is_number(cell.text):
        return _safe(cell.text if not isinstance(cell.value, str) else cell.value)
    return cell.value


def _is_number(text: str) -> bool:
    return bool(text) and not any(part in text for part in (" to ", " of ", ", ", "above"))


def _safe(text: str) -> str:
    text = visible(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text
