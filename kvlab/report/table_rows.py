"""Tables whose columns stand beside their cells: one place says a column's head and its number."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report import document as doc
from kvlab.report import table_columns as cols
from kvlab.report.formatting import PLUS_MINUS
from kvlab.store.metrics import METRICS

Value = doc.Cell | str | int
Entries = Iterable[tuple[doc.Column | str, Value] | tuple[str, Value, str]]
"""A row: each column, or its head, with its cell, text or count, and a hint. All rows of a table
have the same columns."""


@dataclass(frozen=True)
class KeyedRow:
    """A row, the design's cell or change that it is about, and its emphasis."""

    entries: Entries
    key: str = ""
    tone: doc.Tone = ""


def pair(heads: Iterable[str], *values: Value) -> Entries:
    """Return a row of columns without hints."""
    return zip(heads, values, strict=True)


def make_table(name: str, caption: str, rows: Iterable[KeyedRow]) -> doc.Table:
    """Return a table. A column that is given by its head has numbers if its cells have."""
    heads: list[tuple[doc.Column | str, str]] = []
    made = []
    for row in rows:
        entries = tuple(row.entries)
        heads = [(entry[0], entry[2] if len(entry) == 3 else "") for entry in entries]
        cells = tuple(_make_cell(entry[1]) for entry in entries)
        made.append(doc.Row(cells, row.key, row.tone))
    columns = []
    for index, (head, hint) in enumerate(heads):
        if isinstance(head, str):
            values = (row.cells[index].value for row in made)
            head = doc.Column(head, any(isinstance(value, int | float) for value in values), hint)
        columns.append(head)
    return doc.Table(name, caption, tuple(columns), tuple(made))


def _make_cell(value: Value) -> doc.Cell:
    if isinstance(value, str):
        return doc.cell(value)
    return value if isinstance(value, doc.Cell) else doc.cell(f"{value:,}", value)


def cells_table(
    study: Study,
    name: str,
    caption: str,
    entries: Callable[[Levels], Entries],
    cells: Iterable[Levels] | None = None,
) -> doc.Table:
    """Return a table of one row for each cell of the design.

    Args:
        study: The study.
        name: Of the table.
        caption: Of the table.
        entries: Returns a cell's columns after its name. A cell without any value is left out.
        cells: The cells, by default all.
    """
    rows = []
    for levels in study.cells if cells is None else cells:
        found = tuple(entries(levels))
        if any(entry[1] is not doc.EMPTY_CELL for entry in found):
            rows.append(KeyedRow((("cell", study.label(levels)), *found), study.cell_key(levels)))
    return make_table(name, caption, rows)


def number_cell(value: float | None, show: Callable[[float], str]) -> doc.Cell:
    """Return a cell of a number that may be absent."""
    return doc.EMPTY_CELL if value is None else doc.cell(show(value), value)


def spread_cell(
    values: Sequence[float],
    show: Callable[[float], str],
    show_spread: Callable[[float], str] | None = None,
) -> doc.Cell:
    """Return a mean with its standard deviation; empty without values."""
    if not values:
        return doc.EMPTY_CELL
    mean, spread = cols.mean_and_spread(values)
    text = show(mean)
    if spread is not None:
        text += f" {PLUS_MINUS} {(show_spread or show)(spread)}"
    return doc.Cell(text, mean, csv=(mean, spread))


def text_metric(study: Study, loss: float) -> tuple[str, float] | None:
    """Return a loss of the primary metric as bits per byte or perplexity; None of other metrics."""
    if METRICS[study.primary_metric].unit != "nats/token":
        return None
    if study.tokenizers == {"bytes"}:
        return "bits/byte", loss / math.log(2)
    return "perplexity", math.exp(min(loss, 700.0))
