"""From a sweep's design, conditions, exclusions and inclusions to its cells, with counts per rule.

In this order: the design gives cells; ``when`` switches factors off, and cells that then look
the same become one; ``exclude`` drops; ``include`` adds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlab.spec.design import Axis, Design, DesignError, DesignRequest, Positions
from kvlab.spec.designs import DESIGNS

if TYPE_CHECKING:
    from kvlab.spec.sweep import Sweep

Levels = Mapping[str, str]

MAX_CELLS = 100_000


@dataclass(frozen=True)
class SelectedCell:
    """One cell before it is an experiment. ``off`` names the factors that `when` switched off:
    they stand at their baseline level and patch nothing."""

    levels: Levels
    off: frozenset[str]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class RuleEffect:
    """What one rule did.

    Attributes:
        name: ``exclude 3``: its kind and its place in the list, from 1; or ``when window``.
        text: the rule as written.
        changed: cells that it removed, merged into others, or added.
        matched: cells that it fits, also those that an earlier rule had removed.
        total: cells of the design.
    """

    name: str
    text: str
    changed: int
    matched: int
    total: int

    def __str__(self) -> str:
        kind = self.name.split()[0]
        verb = {"when": "merged", "exclude": "removed", "include": "added"}[kind]
        tail = "" if kind == "include" else f" of {self.total:,}"
        earlier = self.matched - self.changed
        why = {"exclude": "an earlier rule removed", "include": "the design has"}.get(kind)
        rest = f" ({why} the other {earlier:,})" if why and earlier else ""
        return f"{self.name} {verb} {self.changed:,}{tail}{rest}: {self.text}"


@dataclass(frozen=True)
class Selection:
    """The cells of a sweep, the baseline first.

    ``designed`` counts the cells of the design before any rule; ``notes`` are the design's, such
    as its aliasing.
    """

    cells: tuple[SelectedCell, ...]
    rules: tuple[RuleEffect, ...]
    designed: int
    notes: tuple[str, ...]


def select_cells(sweep: "Sweep") -> Selection:
    """The cells that a sweep asks for.

    Raises:
        DesignError: the design cannot be made of these factors, or has too many cells.
    """
    axes = _axes(sweep)
    cells: dict[tuple[str, ...], SelectedCell] = {}
    designed: set[Positions] = set()
    notes: list[str] = []
    for name, seeds in sweep.design_seeds.items():
        design, asked = _make_request(sweep, axes, name)
        if not design.filtered and (sweep.exclude or sweep.when):
            text = f"{name} means what it says only whole; leave out exclude and when"
            raise DesignError("design", text)
        for positions in _limit_positions(design, asked):
            designed.add(positions)
            _add_cell(cells, _make_cell(sweep, axes, positions, seeds))
        notes += design.notes(asked)
    rules = [*_count_when(sweep, axes, designed), *_exclude_cells(sweep, cells, len(designed))]
    rules += _include_cells(sweep, axes, cells, len(designed))
    ordered = sorted(cells.values(), key=lambda cell: cell.levels != sweep.baseline)
    return Selection(tuple(ordered), tuple(rules), len(designed), tuple(notes))


def _axes(sweep: "Sweep") -> tuple[Axis, ...]:
    """Factors as axes: zipped ones together, at the place of the first."""
    together = {factor: tuple(group) for group in sweep.zip for factor in group}
    axes = []
    for factor in sweep.factors:
        group = together.get(factor, (factor,))
        if factor == group[0]:
            names = [list(sweep.factors[member]) for member in group]
            rows = [dict(zip(group, row, strict=True)) for row in zip(*names, strict=True)]
            base = {member: sweep.baseline[member] for member in group}
            axes.append(Axis(group, (base, *(row for row in rows if row != base))))
    return tuple(axes)


def _make_request(
    sweep: "Sweep", axes: tuple[Axis, ...], name: str
) -> tuple[Design, DesignRequest]:
    kind, _, fraction = name.partition(":")
    asked = DesignRequest(
        axes,
        target=tuple(_target_position(axis, sweep.target) for axis in axes),
        cells=tuple(
            _positions_of_levels(axes, cell, f"cells.{n}")
            for n, cell in enumerate(sweep.cells_asked)
        ),
        fraction=int(fraction or 1),
        generators=sweep.generators,
    )
    return DESIGNS[kind], asked


def _target_position(axis: Axis, target: Levels) -> int | None:
    named = {factor: target[factor] for factor in axis.factors if factor in target}
    fits = [n for n, point in enumerate(axis.points) if point.items() >= named.items()]
    if named and not fits:
        text = f"has levels of {axis.name} that the zip never has together"
        raise DesignError("target", f"{text}; name one of them")
    if named:
        return fits[0]
    return len(axis.points) - 1 if len(axis.points) <= 2 else None


def _positions_of_levels(axes: Sequence[Axis], levels: Levels, place: str) -> Positions:
    """Positions of a cell that is written as levels; what is left out is at the baseline."""
    positions = []
    for axis in axes:
        named = {factor: levels[factor] for factor in axis.factors if factor in levels}
        fits = [n for n, point in enumerate(axis.points) if point.items() >= named.items()]
        if not fits:
            text = f"has levels of {axis.name} that the zip never has together"
            raise DesignError(place, f"{text}; name one of them")
        positions.append(fits[0])
    return tuple(positions)


def _limit_positions(design: Design, asked: DesignRequest) -> Iterator[Positions]:
    for count, positions in enumerate(design.positions(asked)):
        if count == MAX_CELLS:
            text = f"has more than {MAX_CELLS:,} cells; drop levels, or use a smaller design"
            raise DesignError("design", text)
        yield positions


def _make_cell(
    sweep: "Sweep", axes: Sequence[Axis], positions: Positions, seeds: tuple[int, ...]
) -> SelectedCell:
    picked: dict[str, str] = {}
    for axis, position in zip(axes, positions, strict=True):
        picked |= axis.points[position]
    levels = {factor: picked[factor] for factor in sweep.factors}
    off: set[str] = set()
    for factor in sweep.factors if sweep.when else ():
        condition = sweep.when.get(factor, {})
        if not all(f not in off and levels[f] in wanted for f, wanted in condition.items()):
            off.add(factor)
            levels[factor] = sweep.baseline[factor]
    return SelectedCell(levels, frozenset(off), seeds)


def _add_cell(cells: dict[tuple[str, ...], SelectedCell], cell: SelectedCell) -> bool:
    """Adds a cell, or its seeds to the same cell; whether it is new."""
    key = tuple(cell.levels.values())
    before = cells.get(key)
    seeds = cell.seeds if before is None else (*before.seeds, *cell.seeds)
    cells[key] = replace(cell, seeds=tuple(dict.fromkeys(seeds)))
    return before is None


def _count_when(
    sweep: "Sweep", axes: Sequence[Axis], designed: set[Positions]
) -> Iterator[RuleEffect]:
    """A condition merges every cell in which it holds a factor back from another level."""
    held = dict.fromkeys(sweep.when, 0)
    for positions in designed if sweep.when else ():
        for axis, position in zip(axes, positions, strict=True):
            for factor in held.keys() & set(axis.factors):
                wanted = axis.points[position][factor]
                off = factor in _make_cell(sweep, axes, positions, ()).off
                held[factor] += off and wanted != sweep.baseline[factor]
    for factor, count in held.items():
        text = f"{factor} only where {_format_rule(sweep.when[factor])}"
        yield RuleEffect(f"when {factor}", text, count, count, len(designed))


def _exclude_cells(
    sweep: "Sweep", cells: dict[tuple[str, ...], SelectedCell], total: int
) -> Iterator[RuleEffect]:
    gone: set[tuple[str, ...]] = set()
    for number, rule in enumerate(sweep.exclude, 1):
        fits = {key for key, cell in cells.items() if matches_rule(rule, cell)}
        yield RuleEffect(
            f"exclude {number}", _format_rule(rule), len(fits - gone), len(fits), total
        )
        gone |= fits
    for key in gone:
        del cells[key]


def _include_cells(
    sweep: "Sweep", axes: Sequence[Axis], cells: dict[tuple[str, ...], SelectedCell], total: int
) -> Iterator[RuleEffect]:
    for number, rule in enumerate(sweep.include, 1):
        place = f"include.{number - 1}"
        wanted = _expand_rule(rule)
        added = 0
        for levels in wanted:
            cell = _make_cell(
                sweep, axes, _positions_of_levels(axes, levels, place), sweep.all_seeds
            )
            off = next((f for f in levels if f in cell.off), None)
            if off is not None:
                text = f"sets {off}, which `when` switches off there; leave it out"
                raise DesignError(place, text)
            added += _add_cell(cells, cell)
        yield RuleEffect(f"include {number}", _format_rule(rule), added, len(wanted), total)


def _expand_rule(rule: Mapping[str, tuple[str, ...]]) -> list[dict[str, str]]:
    """One cell for every combination of a rule's levels."""
    cells: list[dict[str, str]] = [{}]
    for factor, levels in rule.items():
        cells = [{**cell, factor: level} for cell in cells for level in levels]
        if len(cells) > MAX_CELLS:
            raise DesignError("include", f"adds more than {MAX_CELLS:,} cells; write fewer levels")
    return cells


def matches_rule(rule: Mapping[str, tuple[str, ...]], cell: SelectedCell) -> bool:
    """Whether a cell has one of the rule's levels of each factor that it names."""
    return all(f not in cell.off and cell.levels[f] in levels for f, levels in rule.items())


def _format_rule(rule: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{factor}={'|'.join(levels)}" for factor, levels in rule.items())
