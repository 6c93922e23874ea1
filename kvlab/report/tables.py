"""Tables as CSV: the numbers themselves, unrounded."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

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


def rows_to_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Flat objects as CSV with these columns; a missing or null value is empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_safe(name) for name in names])
    for row in rows:
        writer.writerow([_plain(row.get(name)) for name in names])
    return out.getvalue()


def _plain(value: Any) -> Scalar:
    if value is None or isinstance(value, int | float):
        return value
    return _safe(value if isinstance(value, str) else json.dumps(value))


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
