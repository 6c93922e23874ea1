"""Find where a printed number comes from: what it is, how it is computed, and from which trials.

Every value of a sweep's record is compared with it, and every number that its report prints. A
number of the report that is none of the quantities in `kvlab.report.quantities` has its place there
and the trials of its row.
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvlab.analysis.effects import list_compared_cells
from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.report.document import (
    Bullets,
    Cell,
    Code,
    Document,
    Figure,
    Paragraph,
    Row,
    Strong,
    Table,
)
from kvlab.report.printed_numbers import PrintedNumber, byte_texts, read_unit
from kvlab.report.quantities import Origin, Quantity, Term, list_quantities
from kvlab.report.report_files import make_document

CSV_DIGITS = 6
"""A number with as many significant digits is of a file of unrounded numbers, such as a CSV."""

NEAREST = 3
"""Values that are named where no value is the number."""


@dataclass
class FoundOrigins:
    """What a search of one sweep has found.

    Attributes:
        origins: The quantities that print as the number, the most specific first.
        is_rounded: Whether they have more digits in print: none is printed exactly so.
        sentences: Sentences of the report that hold the number.
        nearest: Other values with what they are, the nearest first.
        searched: Number of values that were searched.
    """

    origins: list[Origin] = field(default_factory=list)
    is_rounded: bool = False
    sentences: list[str] = field(default_factory=list)
    nearest: list[tuple[float, str]] = field(default_factory=list)
    searched: int = 0


def find_origins(study: Study, number: PrintedNumber) -> FoundOrigins:
    """Return everything in a sweep's record and report that prints as a number."""
    return _OriginSearch(study, number).search()


class _OriginSearch:
    def __init__(self, study: Study, number: PrintedNumber):
        self.study, self.number = study, number
        self.hits: list[Origin] = []
        self.near: list[tuple[float, int, Quantity]] = []
        self.searched = 0

    def search(self) -> FoundOrigins:
        for quantity in list_quantities(self.study):
            self.compare(quantity)
        printed = [origin for origin in self.hits if self.is_printed(origin)]
        document = make_document(self.study)
        origins = self.place(document, printed)
        is_rounded = not origins
        if is_rounded and self.number.digits > 1:
            origins = self.place(document, self.hits)
        return FoundOrigins(
            sorted(origins, key=lambda one: (not one.places, len(one.terms), -len(one.places))),
            is_rounded and bool(origins),
            list(dict.fromkeys(self.find_sentences(document))),
            [] if origins else self.list_nearest(),
            self.searched,
        )

    def is_printed(self, origin: Origin) -> bool:
        """Return whether an origin is printed with exactly these digits."""
        is_exact = self.number.digits >= CSV_DIGITS
        return is_exact or any(self.number.is_in(text) for text in origin.texts)

    def compare(self, one: Quantity) -> None:
        """Keep a quantity if it rounds to the number, or is one of the nearest."""
        self.searched += 1
        distance = self.number.distance(one.value, one.unit)
        if distance == 0.0:
            self.hits.append(one.describe())
        elif math.isfinite(distance):
            heapq.heappush(self.near, (-distance, -self.searched, one))
            if len(self.near) > NEAREST:
                heapq.heappop(self.near)

    def list_nearest(self) -> list[tuple[float, str]]:
        found = sorted(self.near, reverse=True)
        return [(one.value, one.describe().title) for _, _, one in found]

    # Places in the report

    def place(self, document: Document, origins: Sequence[Origin]) -> list[Origin]:
        """Return origins with their places, and one for each other number of a table."""
        places: dict[int, list[str]] = {}
        others: dict[tuple[str, float], Origin] = {}
        for table in document.tables:
            title = document.numbers["Table", table.name]
            for row in table.rows:
                for index, cell in enumerate(row.cells):
                    head = table.columns[index].title
                    unit = read_unit(head.rpartition("(")[2].removesuffix(")"))
                    unit = "B" if cell.bytes is not None else unit
                    values = self.match_cell(cell, unit)
                    if values is None:
                        continue
                    place = f"{title} ({table.name}): {_name_row(table, row)}, {head}"
                    owners = [n for n, o in enumerate(origins) if _owns(o, row, values, unit)]
                    for owner in owners:
                        places.setdefault(owner, []).append(place)
                    if not owners:
                        made = self.make_placed(table, row, index, values, place)
                        key = (row.key or place, made.value)
                        known = others.get(key, made)
                        others[key] = replace(known, places=(*known.places, *made.places))
        placed = [replace(o, places=tuple(places.get(n, ()))) for n, o in enumerate(origins)]
        return [*placed, *(replace(o, places=o.places[1:]) for o in others.values())]

    def match_cell(self, cell: Cell, unit: str) -> list[float] | None:
        """Return the values that a table's cell prints as the number; None if it does not.

        Args:
            unit: Of the cell's column; empty if its head has none.
        """
        values = [v for v in (cell.csv or (cell.value,)) if isinstance(v, int | float)]
        rounded = [value for value in values if self.number.is_rounded_from(value, unit)]
        texts = (cell.text, *(byte_texts(cell.bytes) if cell.bytes is not None else ()))
        if any(self.number.is_in(text, unit) for text in texts):
            return rounded
        return rounded if rounded and self.number.digits >= CSV_DIGITS else None

    def make_placed(
        self, table: Table, row: Row, index: int, values: Sequence[float], place: str
    ) -> Origin:
        """Return a number of a table that is none of the quantities above."""
        column = table.columns[index]
        formula = ": ".join(filter(None, (column.title, column.hint)))
        title = f"{column.title} of {_name_row(table, row)}"
        value = values[0] if values else self.number.value
        terms = tuple(map(Term, self.rows_of(row.key)))
        about = f"{formula}. The table: {table.caption}"
        texts = (row.cells[index].text,)
        return Origin(title, texts, value, "", about, terms, frozenset((row.key,)), (place,))

    def rows_of(self, key: str) -> list[TrialRow]:
        """Return the trials behind a row of a table; all trials that are done if it names none."""
        study = self.study
        named = [levels for levels in study.cells if study.cell_key(levels) == key]
        if not named:
            change = tuple(part.partition("=")[::2] for part in key.split("+"))
            if key and all(factor in study.factors for factor, _ in change):
                named = sorted(list_compared_cells(study.cells, study.factors, change))
        cells = named or list(study.cells)
        return [row for levels in cells for row in study.cells[levels].values() if row.is_done]

    def find_sentences(self, document: Document) -> Iterator[str]:
        """Yield the sentences of the report that hold the number, with their section."""
        for section in document.sections.values():
            for content in section.iter_contents():
                for text in _list_texts(content):
                    for sentence in text.split(". "):
                        if self.number.is_in(sentence):
                            yield f"{section.title}: {sentence.strip().rstrip('.')}"


def _owns(origin: Origin, row: Row, values: Sequence[float], unit: str) -> bool:
    """Return whether a row of a table shows an origin's value, in a column of a unit."""
    if row.key and row.key not in origin.keys:
        return False
    if unit and read_unit(origin.unit) not in ("", unit):
        return False
    return any(math.isclose(origin.value, value, rel_tol=1e-12, abs_tol=1e-15) for value in values)


def _name_row(table: Table, row: Row) -> str:
    """Return the texts in front of the first number of a row."""
    names = []
    for column, cell in zip(table.columns, row.cells, strict=True):
        if column.numeric:
            break
        if not column.is_csv_only and cell.text:
            names.append(cell.text)
    return " ".join(names[:3]) or row.cells[0].text


def _list_texts(content: Any) -> Iterator[str]:
    """Yield the running text of a paragraph, of list items or of a figure."""
    if isinstance(content, Paragraph):
        yield _join(content.spans)
    elif isinstance(content, Bullets):
        yield from map(_join, content.items)
    elif isinstance(content, Figure):
        yield content.alt


def _join(spans: Iterable[str | Code | Strong]) -> str:
    return "".join(span if isinstance(span, str) else span.text for span in spans)
