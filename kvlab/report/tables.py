"""Tables as CSV: the numbers themselves, unrounded."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.report.section import Cell, Column, Scalar, Table
from kvlab.text import visible


def to_csv(table: Table) -> str:
    """RFC 4180 with ``\\n``; text that a spreadsheet would run as a formula gets a quote first.

    A column whose cells hold several numbers, such as a mean and its spread, becomes several.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_safe(name) for column in table.columns for name in _names(column)])
    for row in table.rows:
        pairs = zip(table.columns, row.cells, strict=True)
        writer.writerow([_plain(value) for one in pairs for value in _values(*one)])
    return out.getvalue()


def _names(column: Column) -> tuple[str, ...]:
    return column.csv or (column.title,)


def _values(column: Column, cell: Cell) -> tuple[Scalar, ...]:
    names = _names(column)
    if not cell.csv and cell.value is None:
        return (None,) * len(names)
    values = cell.csv or (cell.value,)
    assert len(values) == len(names), f"{column.title}: {len(values)} values, {len(names)} columns"
    return values


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


def _safe(text: str) -> str:
    text = visible(text)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t") else text
