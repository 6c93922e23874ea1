"""The column of a table of effects that names what each is aliased with, if any is."""

from collections.abc import Sequence
from dataclasses import replace

from kvlab.report.effects import Effect, named
from kvlab.report.section import EMPTY, Cell, Column, Row


def with_aliases(
    columns: tuple[Column, ...], rows: tuple[Row, ...], effects: Sequence[Effect]
) -> tuple[tuple[Column, ...], tuple[Row, ...]]:
    """The columns and rows, one row an effect, with what it is aliased with at the end."""
    if not any(effect.aliases for effect in effects):
        return columns, rows
    column = Column("aliased with", hint="a part of these is in the difference")
    longer = zip(rows, effects, strict=True)
    return (*columns, column), tuple(
        replace(row, cells=(*row.cells, _cell(effect))) for row, effect in longer
    )


def _cell(effect: Effect) -> Cell:
    listed = "; ".join(map(named, effect.aliases))
    return Cell(listed, listed) if listed else EMPTY
