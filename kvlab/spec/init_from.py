"""`training.init_from` that names another cell: which cell that is, and whether it fits.

`kvlab.trial.initial_weights` turns what is checked here into the weights of a trial.
"""

from collections.abc import Iterator, Mapping

from kvlab.errors import Problem
from kvlab.spec.spec_model import Problems
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.sweep_validation import find_level_problems
from kvlab.spec.validation_errors import FieldError

INIT_FROM_FIELD = ("training", "init_from")

CellKey = tuple[tuple[str, str], ...]


def cell_key(levels: Mapping[str, str]) -> CellKey:
    """Return levels as a key that does not depend on their order."""
    return tuple(sorted(levels.items()))


def get_source_levels(cell: Cell) -> dict[str, str] | None:
    """Return the levels of the cell that this one starts from; None if it starts from no cell.

    They are the cell's own levels except for those that ``init_from`` names.
    """
    init_from = cell.experiment.training.init_from
    return {**cell.levels, **init_from} if isinstance(init_from, dict) else None


def find_init_from_problems(sweep: Sweep) -> Iterator[Problem]:
    """Yield why cells cannot start from others, at the levels that set ``training.init_from``."""
    cells_by_key = {cell_key(cell.levels): cell for cell in sweep.cells()}
    for cell in sweep.cells():
        for field, message in _find_source_problems(sweep, cell, cells_by_key):
            error = FieldError(tuple(field.split(".")), f"{field} = {message}")
            yield sweep.locate(error, cell.levels)


def _find_source_problems(sweep: Sweep, cell: Cell, cells: Mapping[CellKey, Cell]) -> Problems:
    init_from, levels = cell.experiment.training.init_from, get_source_levels(cell)
    if not isinstance(init_from, dict) or levels is None:
        return
    field = "training.init_from"
    if unknown := [*find_level_problems(sweep, field, init_from)]:
        for name, rule in unknown:
            yield name, f"{init_from[name.removeprefix(f'{field}.')]} {rule}"
        return
    written = ", ".join(f"{factor}: {level}" for factor, level in init_from.items())
    name = " ".join(f"{factor}={level}" for factor, level in levels.items())
    text, source = f"{{{written}}} is the cell {name}", cells.get(cell_key(levels))
    if source is None:
        yield field, f"{text}, which is not in the design; include it, or start from another cell"
        return
    if _is_cyclic(cell, cells):
        rule = f"is circular for the cell {cell.label}; remove init_from from one of its cells"
        yield field, f"{{{written}}} {rule}"
    if missing := sorted(set(cell.seeds) - set(source.seeds)):
        seeds = ", ".join(map(str, missing))
        yield field, f"{text}, which is not planned at seed {seeds}; add it there"
    own, other = cell.experiment, source.experiment
    if own.data.tokenizer != other.data.tokenizer:
        rule = f"whose tokens are those of {other.data.tokenizer}, not {own.data.tokenizer}"
        yield field, f"{text}, {rule}; give both cells one tokenizer"
    if own.model.n_embd != other.model.n_embd:
        rule = f"whose n_embd = {other.model.n_embd} is not {own.model.n_embd}, so no weight fits"
        yield field, f"{text}, {rule}; start from another cell"


def _is_cyclic(cell: Cell, cells: Mapping[CellKey, Cell]) -> bool:
    """Return whether following the sources from ``cell`` leads back to a cell."""
    visited: set[CellKey] = set()
    current: Cell | None = cell
    while current is not None and cell_key(current.levels) not in visited:
        visited.add(cell_key(current.levels))
        levels = get_source_levels(current)
        current = None if levels is None else cells.get(cell_key(levels))
    return current is not None
