"""Check a sweep across its keys: that names exist, and that keys have an effect.

The cells of a loaded sweep are checked here, too: that what they name exists and fits them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvlab.errors import Problem, SpecError
from kvlab.humanize import suggest_name
from kvlab.own_extensions import explain_missing, find_file_problems, find_members
from kvlab.spec.designs import DESIGNS
from kvlab.spec.spec_model import Problems
from kvlab.spec.validation_errors import FieldError, Path

if TYPE_CHECKING:
    from kvlab.spec.experiment import Experiment
    from kvlab.spec.sweep import Cell, CellKey, Sweep


def find_name_problems(sweep: "Sweep") -> Problems:
    """Yield every factor or level that is named and does not exist."""
    yield from find_level_problems(sweep, "baseline", sweep.baseline)
    yield from find_level_problems(sweep, "target", sweep.target)
    for number, cell in enumerate(sweep.listed_cells):
        yield from find_level_problems(sweep, f"cells.{number}", cell)
    for key, rules in (("exclude", sweep.exclude), ("include", sweep.include)):
        for number, rule in enumerate(rules):
            yield from _find_rule_problems(sweep, f"{key}.{number}", rule)
    factors = list(sweep.factors)
    for factor, rule in sweep.when.items():
        if factor not in factors:
            yield f"when.{factor}", f"is not a factor; {suggest_name(factor, factors)}"
            continue
        for other in rule.keys() & set(factors[factors.index(factor) :]):
            yield f"when.{factor}.{other}", f"is not above {factor} in factors; move it there"
        yield from _find_rule_problems(sweep, f"when.{factor}", rule)


def find_search_problems(sweep: "Sweep", search_factor: str) -> Problems:
    """Yield the keys that a search excludes, as it chooses its own cells; or missing factors."""
    if sweep.search is None:
        if not sweep.factors:
            yield "factors", "is missing or empty; give at least one factor, or a search"
        return
    if missing := explain_missing("search"):
        yield "search", missing
    allowed = {"name", "question", "experiment", "seeds", "failures", "search", "report", "scales"}
    if sweep.factors.keys() == {search_factor}:
        allowed.add("factors")
    written = sweep.model_fields_set - allowed
    for name in sorted("cells" if name == "listed_cells" else name for name in written):
        yield name, "cannot be combined with search, which chooses its own cells; remove one"
    if len(sweep.all_seeds) > 1:
        text = "has several seeds, and a search trains each suggestion once"
        yield "seeds", f"{text}; give one, and repeat the best in a sweep of its own"


def find_unused_key_problems(sweep: "Sweep") -> Problems:
    """Yield every key that is written and has no effect."""
    if sweep.designs and sweep.model_fields_set & {"design", "seeds"}:
        yield "designs", "already names designs and their seeds; leave out design and seeds"
    designs = {name.partition(":")[0] for name in sweep.design_seeds}
    for key in sorted(set().union(*(design.keys for design in DESIGNS.values()))):
        readers = {name for name, design in DESIGNS.items() if key in design.keys}
        if getattr(sweep, "listed_cells" if key == "cells" else key) and not designs & readers:
            yield key, f"is used by design: {' or '.join(sorted(readers))} alone; leave it out"


def check_search_resources(sweep: "Sweep", cells: Sequence["Cell"]) -> None:
    """Check that what the trials of a search need is known before they are."""
    if sweep.search is not None and cells[0].experiment.resources.gpus == "auto":
        text = "= auto is measured before trials start, and a search finds its trials as it goes"
        error = FieldError(("resources", "gpus"), f"resources.gpus {text}; write a number")
        raise SpecError([sweep.locate(error, cells[0].levels)])


def check_scored_text(sweep: "Sweep", cells: Sequence["Cell"]) -> None:
    """Check that cells with other tokenizers, or windows of other lengths, are scored on the same
    text."""
    base, kept = cells[0].experiment, sweep.decide.reference or ()
    first: dict[tuple[str, ...], Cell] = {}  # the cells that others are compared with
    for cell in cells:
        data, evaluation = cell.experiment.data, cell.experiment.evaluation
        levels = tuple(cell.levels.get(factor, "") for factor in kept)
        _check_windows(sweep, first.setdefault(levels, cell).experiment, cell)
        if data.tokenizer == base.data.tokenizer or not cell.experiment.training.tokens:
            continue
        text = f"data.tokenizer = {data.tokenizer} is not the baseline's {base.data.tokenizer}, and"
        if evaluation.loss_bytes is None or base.evaluation.loss_bytes is None:
            text += " evaluation.loss_tokens scores other text for every tokenizer; set"
            text += " evaluation.loss_bytes in its place"
        elif data.max_tokens is not None:
            text += " data.max_tokens takes other documents for every tokenizer; set data.max_bytes"
            text += " in its place"
        else:
            continue
        raise SpecError([sweep.locate(FieldError(("data", "tokenizer"), text), cell.levels)])


def _check_windows(sweep: "Sweep", base: "Experiment", cell: "Cell") -> None:
    """Check that windows of other lengths, or more of them, are not compared with a baseline's.

    The mean loss of one model differs between them by hundredths of a nat, at every seed alike.
    """
    own, metric = cell.experiment, sweep.decide.metric or "loss"
    is_loss = metric.startswith(("loss", "bits_per_byte"))
    has_windows = own.data.symbol_options is None and len(own.data.parts) == 1
    has_weights = own.training.tokens or own.training.init_from
    if not (is_loss and has_windows and has_weights and own.data == base.data):
        return
    sizes = []
    for one in (own, base):
        scored = one.evaluation
        of_text = {("evaluation", "loss_bytes"): scored.loss_bytes}
        if scored.loss_bytes is None:
            of_text[("model", "block_size")] = one.model.block_size
            of_text[("evaluation", "loss_tokens")] = scored.loss_tokens
            of_text[("evaluation", "served_tokens")] = scored.served_tokens or scored.loss_tokens
        sizes.append(of_text)
    for (section, name), value in sizes[0].items():
        other = sizes[1].get((section, name), value)
        if value != other:
            text = f"{section}.{name} = {value} is not the baseline's {other}, so losses would be"
            way = "set the same evaluation.loss_bytes in both"
            if own.evaluation.positions:  # which has no windows of loss_bytes
                way = "decide by another metric"
            text += f" of other text; {way}, or leave the key out"
            raise SpecError([sweep.locate(FieldError((section, name), text), cell.levels)])


def _find_rule_problems(sweep: "Sweep", key: str, rule: Mapping[str, tuple[str, ...]]) -> Problems:
    if not rule:
        yield key, "names no level, so it would fit every cell; name at least one"
    for factor, levels in rule.items():
        if not levels:
            yield f"{key}.{factor}", "names no level; name at least one, or leave it out"
        for level in levels:
            yield from find_level_problems(sweep, key, {factor: level})


def find_level_problems(sweep: "Sweep", key: str, levels: Mapping[str, str]) -> Problems:
    """Yield every factor or level of ``levels`` that does not exist, as a problem below ``key``."""
    for factor, level in levels.items():
        if factor not in sweep.factors:
            yield f"{key}.{factor}", f"is not a factor; {suggest_name(factor, sweep.factors)}"
        elif level not in sweep.factors[factor]:
            hint = suggest_name(level, sweep.factors[factor])
            yield f"{key}.{factor}", f"is not a level of {factor}; {hint}"


# Cells


def find_cell_problems(sweep: "Sweep") -> Iterator[Problem]:
    """Yield every problem at the level, or at the key of the base experiment, that causes it."""
    cells = {cell.key: cell for cell in sweep.cells()}
    for cell in sweep.cells():
        problems = (
            *_find_source_problems(sweep, cell, cells),
            *_find_text_problems(cell),
            *find_file_problems(cell.experiment),
        )
        for field, message in problems:
            path: Path = tuple(int(key) if key.isdecimal() else key for key in field.split("."))
            yield sweep.locate(FieldError(path, f"{field}{message}"), cell.levels)
        for find in find_members("cell_problems").values():
            yield from find(sweep, cell)


def _find_text_problems(cell: "Cell") -> Problems:
    """Yield why the seeds of a cell do not score texts of their own."""
    training, most = cell.experiment.training, max(cell.seeds)
    parts = cell.experiment.evaluation.text_parts
    if parts is not None and most >= parts:
        text = f" = {parts} has no part for seed {most}; use {most + 1} or more"
        yield "evaluation.text_parts", text
    is_given = isinstance(training.init_from, str) and not training.tokens
    if is_given and parts is None and len(cell.seeds) > 1:
        text = " = 0 trains nothing, so all seeds measure the same; give one seed, or"
        yield "training.tokens", f"{text} evaluation.text_parts"


def _find_source_problems(
    sweep: "Sweep", cell: "Cell", cells: Mapping["CellKey", "Cell"]
) -> Problems:
    """Yield why a cell cannot start from the one that its ``training.init_from`` names."""
    init_from, levels = cell.experiment.training.init_from, cell.source_levels
    if not isinstance(init_from, dict) or levels is None:
        return
    field = "training.init_from"
    if unknown := [*find_level_problems(sweep, field, init_from)]:
        for name, rule in unknown:
            yield name, f" = {init_from[name.removeprefix(f'{field}.')]} {rule}"
        return
    written = ", ".join(f"{factor}: {level}" for factor, level in init_from.items())
    name = " ".join(f"{factor}={level}" for factor, level in levels.items())
    text, source = f" = {{{written}}} is the cell {name}", cells.get(frozenset(levels.items()))
    if source is None:
        yield field, f"{text}, which is not in the design; include it, or start from another cell"
        return
    visited = set["CellKey"]()
    current: Cell | None = cell
    while current is not None and current.key not in visited:
        visited.add(current.key)
        current = None if current.source_key is None else cells.get(current.source_key)
    if current is not None:
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
