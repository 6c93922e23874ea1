"""Check the cells of a loaded sweep: that what they name exists and fits them."""

from collections.abc import Iterator, Mapping

from kvlab.errors import Problem
from kvlab.spec.conversations_config import read_trace
from kvlab.spec.evaluation_config import find_task_file
from kvlab.spec.init_from import CellKey, cell_key, get_source_levels
from kvlab.spec.spec_model import Problems
from kvlab.spec.sweep import Cell, Sweep
from kvlab.spec.sweep_validation import find_level_problems
from kvlab.spec.tuning_config import TUNED_KEY, find_token_problem, is_tuned
from kvlab.spec.validation_errors import FieldError, Path


def find_cell_problems(sweep: Sweep) -> Iterator[Problem]:
    """Yield every problem at the level, or at the key of the base experiment, that causes it."""
    cells = {cell_key(cell.levels): cell for cell in sweep.cells()}
    for cell in sweep.cells():
        problems = (*_find_source_problems(sweep, cell, cells), *_find_file_problems(cell))
        for field, message in problems:
            path: Path = tuple(int(key) if key.isdecimal() else key for key in field.split("."))
            yield sweep.locate(FieldError(path, f"{field}{message}"), cell.levels)
        if sweep.tune is not None and is_tuned(cell):
            yield from _find_tuning_problems(sweep, cell, sweep.tune.tokens)


def _find_file_problems(cell: Cell) -> Problems:
    """Yield why a task of lm-eval or a trace cannot be read."""
    for number, task in enumerate(cell.experiment.evaluation.lm_eval):
        try:
            find_task_file(task)
        except LookupError as error:
            yield f"evaluation.lm_eval.{number}", f" = {task.task} {error}"
    load = cell.experiment.benchmark.conversations
    if load is not None and load.trace is not None:
        try:
            read_trace(load.trace, load.count)
        except LookupError as error:
            yield "benchmark.conversations.trace", f": {error}"


def _find_source_problems(sweep: Sweep, cell: Cell, cells: Mapping[CellKey, Cell]) -> Problems:
    """Yield why a cell cannot start from the one that its ``training.init_from`` names."""
    init_from, levels = cell.experiment.training.init_from, get_source_levels(cell)
    if not isinstance(init_from, dict) or levels is None:
        return
    field = "training.init_from"
    if unknown := [*find_level_problems(sweep, field, init_from)]:
        for name, rule in unknown:
            yield name, f" = {init_from[name.removeprefix(f'{field}.')]} {rule}"
        return
    written = ", ".join(f"{factor}: {level}" for factor, level in init_from.items())
    name = " ".join(f"{factor}={level}" for factor, level in levels.items())
    text, source = f" = {{{written}}} is the cell {name}", cells.get(cell_key(levels))
    if source is None:
        yield field, f"{text}, which is not in the design; include it, or start from another cell"
        return
    if _is_cyclic(cell, cells):
        rule = f"is circular for the cell {cell.label}; remove init_from from one of its cells"
        yield field, f" = {{{written}}} {rule}"
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


def _find_tuning_problems(sweep: Sweep, cell: Cell, tokens: int | None) -> Iterator[Problem]:
    """Yield why the learning rate of a cell cannot be tuned."""
    training, document = cell.experiment.training, sweep.source.document
    for factor, level in cell.levels.items():
        if TUNED_KEY in sweep.factors[factor][level]:
            rate = f"{TUNED_KEY} = {training.learning_rate:g}"
            text = f"{rate} is set by a level, and tune sets it; remove one"
            yield document.problem(("factors", factor, level, TUNED_KEY), text)
    if not training.steps:
        text = f"training.tokens = {training.tokens} trains nothing, so no rate is better"
        error = FieldError(("training", "tokens"), f"{text}; remove tune")
        yield sweep.locate(error, cell.levels)
    elif text := find_token_problem(tokens, cell.experiment):
        yield document.problem(("tune", "tokens"), f"tune.tokens = {tokens} {text}")
