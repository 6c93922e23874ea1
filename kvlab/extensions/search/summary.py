"""A search in the terminal: its space before it runs, its best trials afterwards."""

from collections.abc import Iterator
from pathlib import Path

from kvlab.analysis.search_results import SearchResults
from kvlab.extensions.search.optuna_sampler import check_search, objective_direction
from kvlab.humanize import format_number
from kvlab.spec import Sweep
from kvlab.spec.search_config import format_settings, split_sampler
from kvlab.spec.validation_errors import format_value

MAX_BEST = 10
"""Trials of a front that are listed."""


def format_search_space(sweep: Sweep) -> Iterator[str]:
    """Yield the space, the objectives and the budget of a search.

    Raises:
        SpecError: As `check_search`.
    """
    check_search(sweep)
    search = sweep.search
    assert search is not None, "only for sweeps with a search"
    for key, values in search.choices.items():
        yield f"Search {key} in {', '.join(map(format_value, values))}."
    for key, interval in search.ranges.items():
        flags = [*(["log"] if interval.log else []), *(["whole"] if interval.whole else [])]
        yield f"Search {key} from {interval.low:g} to {interval.high:g}{_in_parentheses(flags)}."
    objectives = ", ".join(f"{objective_direction(name)} {name}" for name in search.objectives)
    budget = [
        *([f"{search.trials:,} trials"] if search.trials else []),
        *([f"{format_number(search.flops)} FLOPs"] if search.flops else []),
        *([f"{search.hours:g} hours"] if search.hours else []),
    ]
    if search.pruning is not None:
        rungs = ", ".join(f"{fraction:.3g}" for fraction in search.pruning.rungs or ())
        rule = f"{search.pruning.rule} at {rungs} of the steps"
        yield f"Pruned by validation loss, whatever the objectives: {rule}."
    sampler, settings = split_sampler(search.sampler)
    sampler += _in_parentheses([f"{key}: {format_value(value)}" for key, value in settings.items()])
    yield f"{sampler}: {objectives}; until {' or '.join(budget)}, {search.parallel} at once."


def format_search(search: SearchResults) -> Iterator[str]:
    """Yield the state of a search and its best trials with their settings."""
    counts = f"{len(search.trials)} trials of {len(search.suggestions)} suggestions"
    pruned = sum(one.state == "pruned" for one in search.trials)
    if pruned:
        counts += f", {pruned} pruned"
    reason = f": {search.stop_reason}" if search.stop_reason else ""
    yield f"search: {counts}, {format_number(search.spent_flops)} training FLOPs{reason}"
    best = search.best if len(search.objectives) > 1 else search.best[:1]
    for one in best[:MAX_BEST]:
        values = zip(search.objectives, one.values, strict=True)
        objectives = ", ".join(f"{objective.name} {value:.6g}" for objective, value in values)
        yield f"best    {one.trial[:8]} {format_settings(one.settings)}  {objectives}"
    if len(best) > MAX_BEST:
        yield f"and {len(best) - MAX_BEST} more on the front"


def describe_end(search: SearchResults, sweep: Sweep) -> Iterator[str]:
    """Yield what a search has found, and what to do once it is over."""
    yield from format_search(search)
    if search.stop_reason and search.eligible:
        path = Path(sweep.source.document.file).with_name(f"{sweep.name}-confirm.yaml")
        text = "One seed each: the best of many looks better than it is. Confirm on fresh seeds"
        yield f"{text}: kvlab report {sweep.name} --confirm {path}"


def _in_parentheses(words: list[str]) -> str:
    return f" ({', '.join(words)})" if words else ""
