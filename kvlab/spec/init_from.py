"""`training.init_from` that names another cell: which cell that is, and whether it fits.

`kvlab.trial.initial_weights` turns what is checked here into the weights of a trial.
"""

from collections.abc import Iterator, Mapping

from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.sweep_validation import find_level_problems
from kvlab.spec.validation_errors import FieldError, raise_once

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


def check_init_from(sweep: Sweep) -> None:
    """Check that the cells that others start from exist, and that none starts from itself.

    Raises:
        SpecError: each problem is placed at the level that sets ``training.init_from``.
    """
    cells = sweep.cells()
    cells_by_key = {cell_key(cell.levels): cell for cell in cells}
    raise_once(
        sweep.locate(FieldError(path, f"{'.'.join(path)} = {message}"), cell.levels)
        for cell in cells
        for path, message in _find_init_from_problems(sweep, cell, cells_by_key)
    )


def _find_init_from_problems(
    sweep: Sweep, cell: Cell, cells: Mapping[CellKey, Cell]
) -> Iterator[tuple[tuple[str, ...], str]]:
    init_from = cell.experiment.training.init_from
    if not isinstance(init_from, dict):
        return
    unknown = [*find_level_problems(sweep, "training.init_from", init_from)]
    if unknown:
        for name, rule in unknown:
            factor = name.removeprefix("training.init_from.")
            yield (*INIT_FROM_FIELD, factor), f"{init_from[factor]} {rule}"
        return
    levels = {**cell.levels, **init_from}
    written = "{" + ", ".join(f"{factor}: {level}" for factor, level in init_from.items()) + "}"
    name = f"the cell {_format_levels(levels)}"
    source = cells.get(cell_key(levels))
    if source is None:
        text = f"{written} is {name}, which is not in the design"
        yield INIT_FROM_FIELD, f"{text}; include it, or start from another cell"
    elif _is_cyclic(cell, cells):
        text = f"is circular for the cell {_format_levels(cell.levels)}"
        yield INIT_FROM_FIELD, f"{written} {text}; remove init_from from one of its cells"
    elif missing := sorted(set(cell.seeds) - set(source.seeds)):
        text = f"{written} is {name}, which is not planned at seed {', '.join(map(str, missing))}"
        yield INIT_FROM_FIELD, f"{text}; add it there"
    else:
        for reason in _find_incompatibilities(cell, source):
            yield INIT_FROM_FIELD, f"{written} is {name}, {reason}"


def _is_cyclic(cell: Cell, cells: Mapping[CellKey, Cell]) -> bool:
    """Return whether following the sources from ``cell`` leads back to a cell."""
    visited: set[CellKey] = set()
    current: Cell | None = cell
    while current is not None and cell_key(current.levels) not in visited:
        visited.add(cell_key(current.levels))
        levels = get_source_levels(current)
        current = None if levels is None else cells.get(cell_key(levels))
    return current is not None


def _find_incompatibilities(cell: Cell, source: Cell) -> Iterator[str]:
    """Yield why the source's weights would mean nothing in this cell."""
    experiment, other = cell.experiment, source.experiment
    if experiment.data.tokenizer != other.data.tokenizer:
        text = f"whose tokens are those of {other.data.tokenizer}, not {experiment.data.tokenizer}"
        yield f"{text}; give both cells one tokenizer"
    if experiment.model.n_embd != other.model.n_embd:
        text = f"whose n_embd = {other.model.n_embd} is not {experiment.model.n_embd}"
        yield f"{text}, so no weight fits; start from another cell"


def _format_levels(levels: Mapping[str, str]) -> str:
    return " ".join(f"{factor}={level}" for factor, level in levels.items())
