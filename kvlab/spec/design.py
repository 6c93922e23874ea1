"""The contract of a design: which combinations of levels a sweep trains.

A design works on *axes*, each with positions 0, 1, ...; position 0 is the baseline. An axis is
one factor, or several that are zipped and so move together. `kvlab.spec.designs.DESIGNS` is the
table of designs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Positions = tuple[int, ...]
"""One cell: a position on every axis."""


@dataclass(frozen=True)
class Axis:
    """One thing that varies; ``points`` are its levels by factor, the baseline's first."""

    factors: tuple[str, ...]
    points: tuple[Mapping[str, str], ...]

    @property
    def name(self) -> str:
        return "+".join(self.factors)


@dataclass(frozen=True)
class DesignRequest:
    """What a design selects cells from.

    Attributes:
        target: for every axis the position of its reduction, None where several could be meant.
        cells: as written in `cells`, every axis left out at its baseline.
        fraction: 4 in ``fractional:4``, else 1.
        generators: an axis -> the axes whose product sets it; empty to have them chosen.
    """

    axes: tuple[Axis, ...]
    target: tuple[int | None, ...] = ()
    cells: tuple[Positions, ...] = ()
    fraction: int = 1
    generators: Mapping[str, tuple[str, ...]] | None = None

    @property
    def baseline(self) -> Positions:
        return (0,) * len(self.axes)

    def reductions(self) -> list[tuple[int, int]]:
        """Return every axis that has more than its baseline, with its target position.

        Raises:
            DesignError: an axis has several levels beside the baseline and no target.
        """
        reductions = []
        for index, (axis, position) in enumerate(zip(self.axes, self.target, strict=True)):
            if position is None:
                others = [point[axis.factors[0]] for point in axis.points[1:]]
                text = f"must name the level of {axis.factors[0]} that is the reduction"
                raise DesignError("target", f"{text}: {' or '.join(others)}")
            if position:
                reductions.append((index, position))
        return reductions

    def change_baseline(self, changes: Mapping[int, int]) -> Positions:
        """Return the baseline with some axes, by index, at other positions."""
        return tuple(changes.get(index, 0) for index in range(len(self.axes)))


class DesignError(Exception):
    """A design is impossible: the field at fault, the rule and what to do about it."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field, self.message = field, message


@dataclass(frozen=True)
class Design:
    """One member of the family.

    Attributes:
        title: as the report names it.
        positions: the function that gives the cells, the baseline among them; a cell may come
            twice.
        notes: the function that gives remarks for the report, such as which effects are aliased.
        keys: the keys of a sweep that this design reads and others do not.
        arguments: the numbers that may follow its name and a colon; empty if it takes none.
        can_be_filtered: whether it stays valid if cells are excluded or merged.
    """

    title: str
    positions: Callable[[DesignRequest], Iterator[Positions]]
    notes: Callable[[DesignRequest], tuple[str, ...]] = lambda _request: ()
    keys: frozenset[str] = frozenset()
    arguments: tuple[int, ...] = ()
    can_be_filtered: bool = True
