"""The contract of a report's sections, and the neutral structure that they are made of.

A section is a function of a `Study`, in its own file under ``sections/``, named in the table of
``sections/__init__.py``. It returns what is to be said; how it looks is the renderers' affair.
Text is plain: renderers escape every character of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvlab.report.figures.plot import Plot
from kvlab.report.study import Study


@dataclass(frozen=True)
class Code:
    """Text that is quoted literally: a name, a command, an error."""

    text: str


@dataclass(frozen=True)
class Strong:
    text: str


Span = str | Code | Strong

Tone = Literal["", "good", "bad", "muted"]
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Paragraph:
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Bullets:
    items: tuple[tuple[Span, ...], ...]


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str


@dataclass(frozen=True)
class Block:
    """Preformatted text such as YAML, folded away under ``title``."""

    title: str
    text: str
    language: str = ""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        hint: what the head means; it stands under the table in every form.
        csv: the columns that it becomes in the CSV, units in their names; none: one, the title.
    """

    title: str
    numeric: bool = False
    hint: str = ""
    csv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """What a table shows at one place.

    Attributes:
        value: what it sorts by, in the unit of its column's head.
        csv: one for each of its column's CSV columns, in their units; none: the value alone.
    """

    text: str
    value: Scalar = None
    tone: Tone = ""
    code: bool = False
    csv: tuple[Scalar, ...] = ()


@dataclass(frozen=True)
class Row:
    """``key`` names the design's cell that the row is about: figures select by it too."""

    cells: tuple[Cell, ...]
    key: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """``name`` is the file name of its CSV."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    @property
    def legend(self) -> tuple[Column, ...]:
        """The columns whose heads do not say all: their hints stand under the table."""
        return tuple(column for column in self.columns if column.hint)


@dataclass(frozen=True)
class Figure:
    """``name`` is its file name; ``alt`` says in words what there is to see."""

    name: str
    caption: str
    alt: str
    plot: Plot


Content = Paragraph | Bullets | Heading | Block | Table | Figure


@dataclass(frozen=True)
class Section:
    title: str
    contents: tuple[Content, ...]


SectionFunction = Callable[[Study], Section | None]
"""A section's function. None: there is nothing to say."""


def paragraph(*spans: Span) -> Paragraph:
    return Paragraph(spans)


def cell(text: str, value: Scalar = None, tone: Tone = "", csv: tuple[Scalar, ...] = ()) -> Cell:
    """A table cell; without a value it sorts by its text."""
    return Cell(text, text if value is None else value, tone, csv=csv)


EMPTY_CELL = Cell("\N{EN DASH}", None, "muted")
"""The table cell where there is no number."""
