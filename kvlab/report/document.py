"""The content of a report, independent of its output format.

A `Document` is a sequence of `Section` objects, which hold paragraphs, tables and figures. Text
is plain: each renderer (Markdown, HTML, LaTeX, CSV) escapes it for its own format.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Code:
    """Literal text: a name, a command, an error message."""

    text: str


@dataclass(frozen=True)
class Strong:
    text: str


Span = str | Code | Strong

Tone = Literal["", "good", "bad", "muted"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Paragraph:
    """A paragraph. ``lead`` is the report's one-sentence verdict; ``muted`` are facts beside it."""

    spans: tuple[Span, ...]
    tone: Literal["", "lead", "muted"] = ""


@dataclass(frozen=True)
class Bullets:
    items: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str


@dataclass(frozen=True)
class Block:
    """Preformatted text such as YAML, folded under ``title``."""

    title: str
    text: str
    language: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        hint: Explanation of the head, shown under the table in every format.
        csv: Titles of the CSV columns that this column becomes, with their units. Empty: one
            CSV column with the same title.
    """

    title: str
    numeric: bool = False
    hint: str = ""
    csv: tuple[str, ...] = ()
    is_csv_only: bool = False


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        value: Sort key, in the unit of the column's head.
        code: Whether the text is literal, such as a trial id.
        csv: One value for each of the column's CSV columns. Empty: ``value`` alone.
    """

    text: str
    value: Scalar = None
    tone: Tone = ""
    code: bool = False
    csv: tuple[Scalar, ...] = ()


@dataclass(frozen=True)
class Row:
    """One row of a table. ``key`` names the design's cell, which links tables and figures."""

    cells: tuple[Cell, ...]
    key: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """A table. ``name`` is the stem of its CSV and LaTeX files."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def shown(self) -> "Table":
        """The table without the columns that are in its CSV alone."""
        kept = [index for index, column in enumerate(self.columns) if not column.is_csv_only]
        if len(kept) == len(self.columns):
            return self
        rows = (replace(row, cells=tuple(row.cells[i] for i in kept)) for row in self.rows)
        return replace(self, columns=tuple(self.columns[i] for i in kept), rows=tuple(rows))

    @property
    def legend(self) -> tuple[Column, ...]:
        """The columns that have a hint."""
        return tuple(column for column in self.columns if column.hint)


# Plots, in data units; `kvlab.report.figures` draws them

Role = Literal["ink", "muted", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7"]
"""A colour by its purpose; the themes decide on the colours."""

Shape = Literal["dot", "square", "diamond", "triangle", "ring"]

SHAPES: tuple[Shape, ...] = ("dot", "square", "diamond", "triangle", "ring")

SERIES: tuple[Role, ...] = ("c0", "c1", "c2", "c3", "c4", "c5", "c6", "c7")

Dash = Literal["solid", "dashed", "dashdot", "dotted"]

DASHES: tuple[Dash, ...] = ("solid", "dashed", "dashdot", "dotted")
"""From the densest on: a line that covers another lets it be seen."""


@dataclass(frozen=True)
class Point:
    """One point.

    Attributes:
        tip: Lines shown on hovering.
        key: Key of the design's cell, for selection across the page.
        label: Text beside the mark, where there is space.
        seeds: Values at each seed, drawn as small dots: along the x axis if the y axis has names,
            else along the y axis.
    """

    x: float
    y: float
    tip: tuple[str, ...] = ()
    key: str = ""
    label: str = ""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    seeds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Points:
    """A series of marks. ``name`` is its entry in the legend."""

    name: str
    points: tuple[Point, ...]
    role: Role = "c0"
    shape: Shape = "dot"


@dataclass(frozen=True)
class Line:
    """A series joined by a line; its points answer to hovering.

    Attributes:
        shape: A mark at every third point, which tells lines apart that lie close; None for none.
    """

    name: str
    points: tuple[Point, ...]
    role: Role = "c0"
    dash: Dash = "solid"
    shape: Shape | None = None


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        kind: ``bytes`` and ``log`` are logarithmic, on the x axis alone. ``names``, on the y axis
            alone, has one row per name at y = 0, 1, ..., the first on top.
    """

    title: str
    kind: Literal["linear", "bytes", "log", "names"] = "linear"
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A line across the plot where an axis has this value, such as zero or a margin."""

    axis: Literal["x", "y"]
    value: float
    is_dashed: bool = False


@dataclass(frozen=True)
class Plot:
    """Layers on two axes, drawn in order, with lines of reference under them."""

    x: Axis
    y: Axis
    layers: tuple[Points | Line, ...]
    references: tuple[Reference, ...] = ()

    @property
    def marks(self) -> list[Point]:
        """The points of every layer of marks, in the order in which they are drawn."""
        return [p for layer in self.layers if isinstance(layer, Points) for p in layer.points]


@dataclass(frozen=True)
class Figure:
    """A figure.

    Attributes:
        name: Stem of its files.
        alt: What it shows, in words.
        is_half: Whether the page shows it beside the next or the last one.
    """

    name: str
    caption: str
    alt: str
    plot: Plot
    is_half: bool = False


@dataclass(frozen=True)
class Fold:
    """Contents that are folded under ``title`` until a reader opens them."""

    title: str
    contents: tuple["Content", ...]


Content = Paragraph | Bullets | Heading | Block | Table | Figure | Fold


@dataclass(frozen=True)
class Section:
    """A section of a report.

    Attributes:
        is_appendix: Whether it stands after the sections that answer the question, folded.
    """

    title: str
    contents: tuple[Content, ...]
    is_appendix: bool = False

    def iter_contents(self) -> Iterator[Content]:
        """Yield every content that is no fold, also those inside folds, in order."""
        waiting = [*reversed(self.contents)]
        while waiting:
            content = waiting.pop()
            if isinstance(content, Fold):
                waiting += reversed(content.contents)
            else:
                yield content


@dataclass(frozen=True)
class Document:
    """A report: its title, and its sections by their name in the table of sections.

    Renderers show `main`, and then `appendix`, folded.
    """

    title: str
    sections: dict[str, Section]

    @property
    def main(self) -> dict[str, Section]:
        return {name: one for name, one in self.sections.items() if not one.is_appendix}

    @property
    def appendix(self) -> dict[str, Section]:
        return {name: one for name, one in self.sections.items() if one.is_appendix}

    @property
    def tables(self) -> list[Table]:
        return [content for content in self._iter_contents() if isinstance(content, Table)]

    @property
    def figures(self) -> list[Figure]:
        return [content for content in self._iter_contents() if isinstance(content, Figure)]

    def _iter_contents(self) -> Iterator[Content]:
        """Yield every content in the order in which it is rendered."""
        for section in (*self.main.values(), *self.appendix.values()):
            yield from section.iter_contents()

    @property
    def numbers(self) -> dict[tuple[str, str], str]:
        """Number of each table and figure, such as ``("Table", "cells") -> "Table 2"``."""
        tables = {("Table", one.name): f"Table {n}" for n, one in enumerate(self.tables, 1)}
        figures = {("Figure", one.name): f"Figure {n}" for n, one in enumerate(self.figures, 1)}
        return tables | figures


def paragraph(*spans: Span) -> Paragraph:
    return Paragraph(spans)


def plain_text(spans: Iterable[Span]) -> str:
    return "".join(span if isinstance(span, str) else span.text for span in spans)


def cell(text: str, value: Scalar = None, tone: Tone = "", csv: tuple[Scalar, ...] = ()) -> Cell:
    """Return a table cell. Without a value it sorts by its text."""
    return Cell(text, text if value is None else value, tone, csv=csv)


EMPTY_CELL = Cell("\N{EN DASH}", None, "muted")
"""A cell without a value."""


# Tables whose columns stand beside their cells: one place says a head and its number

Value = Cell | str | int
Entries = Iterable[tuple[Column | str, Value] | tuple[str, Value, str]]
"""A row: each column, or its head, with its cell, text or count, and a hint. All rows of a table
have the same columns."""


KeyedRow = tuple[Entries, str] | tuple[Entries, str, bool]
"""A row, the key of the design's cell or change that it is about, and whether it is muted."""


def make_table(name: str, caption: str, rows: Iterable[KeyedRow]) -> Table:
    """Return a table. A column that is given by its head has numbers if its cells have."""
    heads: list[tuple[Column | str, str]] = []
    made = []
    for row in rows:
        entries = tuple(row[0])
        heads = [(entry[0], entry[2] if len(entry) == 3 else "") for entry in entries]
        cells = tuple(_make_cell(entry[1]) for entry in entries)
        made.append(Row(cells, row[1], "muted" if len(row) == 3 and row[2] else ""))
    columns = []
    for index, (head, hint) in enumerate(heads):
        if isinstance(head, str):
            values = (row.cells[index].value for row in made)
            head = Column(head, any(isinstance(value, int | float) for value in values), hint)
        columns.append(head)
    return Table(name, caption, tuple(columns), tuple(made))


def _make_cell(value: Value) -> Cell:
    if isinstance(value, str):
        return cell(value)
    return value if isinstance(value, Cell) else cell(f"{value:,}", value)


# Figures


def draw_series(number: int, name: str, points: Iterable[Point]) -> Line:
    """Return a line with the colour, the dashes and the marks of its number."""
    dash, shape = DASHES[number % len(DASHES)], SHAPES[number % len(SHAPES)]
    return Line(name, tuple(points), SERIES[number], dash, shape)


def describe_points(plot: Plot) -> str:
    """Return in a sentence what marks say on hovering: those of named rows, or with a label."""
    has_names = plot.y.kind == "names"
    marks = sorted(plot.marks, key=lambda point: point.y if has_names else point.x)
    named = (p.tip for p in marks if has_names or p.label)
    return "; ".join(f"{name}: {', '.join(facts)}" for name, *facts in named) + "."


def describe_ends(lines: Iterable[Line]) -> str:
    """Return in a sentence what lines say on hovering at their first and their last point."""
    ends = ((line.name, line.points[0].tip[-1], line.points[-1].tip[-1]) for line in lines)
    return "; ".join(f"{name}: {first} to {last}" for name, first, last in ends) + "."


def draw_steps(places: Iterable[tuple[float, float]]) -> tuple[Point, ...]:
    """Return the corners of the stairs through these places."""
    steps: list[Point] = []
    for x, y in places:
        steps += [Point(x, steps[-1].y)] if steps else []
        steps.append(Point(x, y))
    return tuple(steps)
