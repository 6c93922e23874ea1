"""Which cell's training another cell starts from: `training.init_from` with factor levels."""

from collections.abc import Iterator, Mapping

from kvlab.errors import Problem, SpecError
from kvlab.spec.sweep import Cell, Sweep

FIELD = ("training", "init_from")

CellKey = tuple[tuple[str, str], ...]


def cell_key(levels: Mapping[str, str]) -> CellKey:
    """Levels as a key: equal however they are ordered."""
    return tuple(sorted(levels.items()))


def source_levels(cell: Cell) -> dict[str, str] | None:
    """Levels of the cell that this one starts from: its own but for those that ``init_from``
    names. None if it starts from no cell."""
    start = cell.experiment.training.init_from
    return {**cell.levels, **start} if isinstance(start, dict) else None


def check_starts(sweep: Sweep) -> None:
    """Every cell that starts from another must find it, and none may come back to itself.

    Raises:
        SpecError: with each problem at the level that sets ``training.init_from``.
    """
    cells = sweep.cells()
    known = {cell_key(cell.levels): cell for cell in cells}
    problems: dict[tuple[str, int, int], Problem] = {}
    for cell in cells:
        for path, message in _problems(sweep, cell, known):
            problem = sweep.place((path, f"{'.'.join(path)} = {message}", False), cell.levels)
            problems.setdefault((problem.file, problem.line, problem.column), problem)
    if problems:
        raise SpecError(list(problems.values()))


def _problems(
    sweep: Sweep, cell: Cell, known: Mapping[CellKey, Cell]
) -> Iterator[tuple[tuple[str, ...], str]]:
    start = cell.experiment.training.init_from
    if not isinstance(start, dict):
        return
    wrong = [*sweep.name_problems("training.init_from", start)]
    if wrong:
        for name, rule in wrong:
            factor = name.removeprefix("training.init_from.")
            yield (*FIELD, factor), f"{start[factor]} {rule}"
        return
    levels = {**cell.levels, **start}
    shown = "{" + ", ".join(f"{factor}: {level}" for factor, level in start.items()) + "}"
    name = f"the cell {_label(levels)}"
    source = known.get(cell_key(levels))
    if source is None:
        text = f"{shown} is {name}, which is not in the design"
        yield FIELD, f"{text}; include it, or start elsewhere"
    elif _comes_back(cell, known):
        text = f"in a circle for the cell {_label(cell.levels)}"
        yield FIELD, f"{shown} leads {text}; let one of its cells start without"
    else:
        yield from ((FIELD, f"{shown} is {name}, {why}") for why in _misfits(cell, source))


def _comes_back(cell: Cell, known: Mapping[CellKey, Cell]) -> bool:
    """Whether following the sources from ``cell`` never ends."""
    seen: set[CellKey] = set()
    at: Cell | None = cell
    while at is not None:
        key = cell_key(at.levels)
        if key in seen:
            return True
        seen.add(key)
        levels = source_levels(at)
        at = None if levels is None else known.get(cell_key(levels))
    return False


def _misfits(cell: Cell, source: Cell) -> Iterator[str]:
    """Why the source's weights would mean nothing here."""
    ours, theirs = cell.experiment, source.experiment
    if ours.data.tokenizer != theirs.data.tokenizer:
        text = f"whose tokens are those of {theirs.data.tokenizer}, not {ours.data.tokenizer}"
        yield f"{text}; give both cells one tokenizer"
    if ours.model.n_embd != theirs.model.n_embd:
        text = f"whose n_embd = {theirs.model.n_embd} is not {ours.model.n_embd}"
        yield f"{text}, so no weight fits; start elsewhere"


def _label(levels: Mapping[str, str]) -> str:
    return " ".join(f"{factor}={level}" for factor, level in levels.items())
