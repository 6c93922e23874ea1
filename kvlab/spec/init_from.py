"""Which cell's training another cell starts from: `training.init_from` with factor levels."""

from collections.abc import Iterator, Mapping

from kvlab.errors import Problem, SpecError
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.sweep_validation import level_problems

INIT_FROM_FIELD = ("training", "init_from")

CellKey = tuple[tuple[str, str], ...]


def cell_key(levels: Mapping[str, str]) -> CellKey:
    """Levels as a key: equal however they are ordered."""
    return tuple(sorted(levels.items()))


def source_cell_levels(cell: Cell) -> dict[str, str] | None:
    """Levels of the cell that this one starts from: its own but for those that ``init_from``
    names. None if it starts from no cell."""
    start = cell.experiment.training.init_from
    return {**cell.levels, **start} if isinstance(start, dict) else None


def check_init_from(sweep: Sweep) -> None:
    """Every cell that starts from another must find it, and none may come back to itself.

    Raises:
        SpecError: with each problem at the level that sets ``training.init_from``.
    """
    cells = sweep.cells()
    known = {cell_key(cell.levels): cell for cell in cells}
    problems: dict[tuple[str, int, int], Problem] = {}
    for cell in cells:
        for path, message in _init_from_problems(sweep, cell, known):
            problem = sweep.place((path, f"{'.'.join(path)} = {message}", False), cell.levels)
            problems.setdefault((problem.file, problem.line, problem.column), problem)
    if problems:
        raise SpecError(list(problems.values()))


def _init_from_problems(
    sweep: Sweep, cell: Cell, known: Mapping[CellKey, Cell]
) -> Iterator[tuple[tuple[str, ...], str]]:
    start = cell.experiment.training.init_from
    if not isinstance(start, dict):
        return
    wrong = [*level_problems(sweep, "training.init_from", start)]
    if wrong:
        for name, rule in wrong:
            factor = name.removeprefix("training.init_from.")
            yield (*INIT_FROM_FIELD, factor), f"{start[factor]} {rule}"
        return
    levels = {**cell.levels, **start}
    shown = "{" + ", ".join(f"{factor}: {level}" for factor, level in start.items()) + "}"
    name = f"the cell {_format_levels(levels)}"
    source = known.get(cell_key(levels))
    if source is None:
        text = f"{shown} is {name}, which is not in the design"
        yield INIT_FROM_FIELD, f"{text}; include it, or start elsewhere"
    elif _is_cyclic(cell, known):
        text = f"in a circle for the cell {_format_levels(cell.levels)}"
        yield INIT_FROM_FIELD, f"{shown} leads {text}; let one of its cells start without"
    elif set(cell.seeds) - set(source.seeds):
        seeds = ", ".join(map(str, sorted(set(cell.seeds) - set(source.seeds))))
        yield (
            INIT_FROM_FIELD,
            f"{shown} is {name}, which is not planned at seed {seeds}; give it that too",
        )
    else:
        yield from (
            (INIT_FROM_FIELD, f"{shown} is {name}, {why}")
            for why in _incompatibilities(cell, source)
        )


def _is_cyclic(cell: Cell, known: Mapping[CellKey, Cell]) -> bool:
    """Whether following the sources from ``cell`` never ends."""
    seen: set[CellKey] = set()
    at: Cell | None = cell
    while at is not None:
        key = cell_key(at.levels)
        if key in seen:
            return True
        seen.add(key)
        levels = source_cell_levels(at)
        at = None if levels is None else known.get(cell_key(levels))
    return False


def _incompatibilities(cell: Cell, source: Cell) -> Iterator[str]:
    """Why the source's weights would mean nothing here."""
    ours, theirs = cell.experiment, source.experiment
    if ours.data.tokenizer != theirs.data.tokenizer:
        text = f"whose tokens are those of {theirs.data.tokenizer}, not {ours.data.tokenizer}"
        yield f"{text}; give both cells one tokenizer"
    if ours.model.n_embd != theirs.model.n_embd:
        text = f"whose n_embd = {theirs.model.n_embd} is not {ours.model.n_embd}"
        yield f"{text}, so no weight fits; start elsewhere"


def _format_levels(levels: Mapping[str, str]) -> str:
    return " ".join(f"{factor}={level}" for factor, level in levels.items())
