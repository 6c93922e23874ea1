"""Select the cells of a sweep, and count what each rule did.

The design gives cells; then ``when`` switches factors off, and cells that are then alike become
one; then ``exclude`` drops cells; then ``include`` adds cells.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvlab.spec.designs import DESIGNS, DesignError, DesignRequest

if TYPE_CHECKING:
    from kvlab.spec.sweep import Sweep

Levels = Mapping[str, str]
LevelRule = Mapping[str, tuple[str, ...]]

MAX_CELLS = 100_000


@dataclass(frozen=True)
class SelectedCell:
    """One cell before it is an experiment. ``off`` names the factors that `when` switched off:
    they stand at their baseline level and patch nothing."""

    levels: Levels
    off: frozenset[str]
    seeds: tuple[int, ...]


CellsByLevels = dict[tuple[str, ...], SelectedCell]


@dataclass(frozen=True)
class RuleEffect:
    """What one rule did.

    Attributes:
        name: ``exclude 3``, its kind and its number in the list, from 1; or ``when window``.
        changed: cells that it removed, merged into others, or added.
        matched: cells that it fits, also those that an earlier rule had removed.
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
    """Return the cells that a sweep selects."""
    cells: CellsByLevels = {}
    designed, merged, notes = set[tuple[str, ...]](), Counter[str](), list[str]()
    for name, seeds in sweep.design_seeds.items():
        kind, _, fraction = name.partition(":")
        design, names = DESIGNS[kind], sweep.level_names
        request = DesignRequest(names, sweep.target, sweep.listed_cells, int(fraction or 1))
        if not design.can_be_filtered and (sweep.exclude or sweep.when):
            key = f"designs.{name}" if sweep.designs else "design"
            raise DesignError(key, "is valid only as a whole; remove exclude and when")
        for count, changes in enumerate(design.cells(request)):
            if count == MAX_CELLS:
                text = f"has more than {MAX_CELLS:,} cells; drop levels, or use a smaller design"
                raise DesignError("design", text)
            levels = {**sweep.baseline, **changes}
            own, cell = tuple(levels.values()), _make_cell(sweep, levels, seeds)
            if own not in designed:
                merged.update(f for f in cell.off if levels[f] != sweep.baseline[f])
            designed.add(own)
            _add_cell(cells, cell)
        notes += design.notes(request)
    total, rules = len(designed), list[RuleEffect]()
    for factor, rule in sweep.when.items():
        text = f"{factor} only where {_format_rule(rule)}"
        rules.append(RuleEffect(f"when {factor}", text, merged[factor], merged[factor], total))
    rules += _exclude_cells(sweep, cells, total)
    rules += _include_cells(sweep, cells, total)
    ordered = sorted(cells.values(), key=lambda cell: cell.levels != sweep.baseline)
    return Selection(tuple(ordered), tuple(rules), total, tuple(notes))


def _make_cell(sweep: "Sweep", levels: Levels, seeds: tuple[int, ...]) -> SelectedCell:
    """Return the cell of these levels, with factors off where their `when` does not hold."""
    levels, off = dict(levels), set[str]()
    for factor in sweep.factors if sweep.when else ():
        condition = sweep.when.get(factor, {})
        if not all(f not in off and levels[f] in allowed for f, allowed in condition.items()):
            off.add(factor)
            levels[factor] = sweep.baseline[factor]
    return SelectedCell(levels, frozenset(off), seeds)


def _add_cell(cells: CellsByLevels, cell: SelectedCell) -> bool:
    """Add a cell, or its seeds to the cell of the same levels; return whether it is new."""
    key = tuple(cell.levels.values())
    existing = cells.get(key)
    seeds = (*existing.seeds, *cell.seeds) if existing else cell.seeds
    cells[key] = replace(cell, seeds=tuple(dict.fromkeys(seeds)))
    return existing is None


def _exclude_cells(sweep: "Sweep", cells: CellsByLevels, total: int) -> Iterator[RuleEffect]:
    excluded: set[tuple[str, ...]] = set()
    for number, rule in enumerate(sweep.exclude, 1):
        matched = {
            key
            for key, cell in cells.items()
            if all(f not in cell.off and cell.levels[f] in levels for f, levels in rule.items())
        }
        text, changed = _format_rule(rule), len(matched - excluded)
        yield RuleEffect(f"exclude {number}", text, changed, len(matched), total)
        excluded |= matched
    for key in excluded:
        del cells[key]


def _include_cells(sweep: "Sweep", cells: CellsByLevels, total: int) -> Iterator[RuleEffect]:
    for number, rule in enumerate(sweep.include, 1):
        key = f"include.{number - 1}"
        combinations: list[dict[str, str]] = [{}]
        for factor, levels in rule.items():
            combinations = [{**cell, factor: level} for cell in combinations for level in levels]
            if len(combinations) > MAX_CELLS:
                raise DesignError(key, f"adds more than {MAX_CELLS:,} cells; write fewer levels")
        added = 0
        for named in combinations:
            cell = _make_cell(sweep, {**sweep.baseline, **named}, sweep.all_seeds)
            for factor in (f for f in named if f in cell.off):
                text = f"sets {factor}, which `when` switches off there; leave it out"
                raise DesignError(key, text)
            added += _add_cell(cells, cell)
        yield RuleEffect(f"include {number}", _format_rule(rule), added, len(combinations), total)


def _format_rule(rule: LevelRule) -> str:
    return ", ".join(f"{factor}={'|'.join(levels)}" for factor, levels in rule.items())
