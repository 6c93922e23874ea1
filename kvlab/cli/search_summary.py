"""What a search looks for and what it has found, for the terminal."""

from collections.abc import Iterator

from kvlab.humanize import format_number
from kvlab.spec import Sweep
from kvlab.spec.samplers import split_sampler
from kvlab.spec.validation_errors import format_value
from kvlab.store import Store
from kvlab.sweep.search.objectives import check_objectives, objective_direction
from kvlab.sweep.search.searcher import Searcher


def space_lines(sweep: Sweep) -> Iterator[str]:
    """The space, the objectives and the budget of a sweep that searches.

    Raises:
        SpecError: an objective or a limit is no number that can be had.
    """
    check_objectives(sweep)
    search = sweep.search
    assert search is not None, "only for sweeps with a search"
    for key, values in search.choices.items():
        yield f"Search {key} in {', '.join(map(format_value, values))}."
    for key, asked in search.ranges.items():
        how = [*(["log"] if asked.log else []), *(["whole"] if asked.whole else [])]
        yield f"Search {key} from {asked.low:g} to {asked.high:g}{_in_parentheses(how)}."
    aims = ", ".join(f"{objective_direction(name)} {name}" for name in search.objectives)
    budget = [
        *([f"{search.trials:,} trials"] if search.trials else []),
        *([f"{format_number(search.flops)} FLOPs"] if search.flops else []),
        *([f"{search.hours:g} hours"] if search.hours else []),
    ]
    if search.pruning is not None:
        at = ", ".join(f"{fraction:.3g}" for fraction in search.pruning.rungs or ())
        rule = f"{search.pruning.rule} at {at} of the steps"
        yield f"Pruned by validation loss, whatever the objectives: {rule}."
    name, told = split_sampler(search.sampler)
    name += _in_parentheses([f"{key}: {format_value(value)}" for key, value in told.items()])
    yield f"{name}: {aims}; until {' or '.join(budget)}, {search.parallel} at once."


def search_lines(search: Searcher) -> Iterator[str]:
    """How a search stands, and the best that it has found."""
    trained = sum(point.has_trial for point in search.suggestions)
    why = f": {search.stop_reason}" if search.stop_reason else ""
    pruned = sum(
        point.has_trial and point.observation.state == "pruned" for point in search.suggestions
    )
    left = f", {pruned} pruned" if pruned else ""
    spent = f"{format_number(search.flops)} training FLOPs"
    yield f"search: {trained} trials of {len(search.suggestions)} suggestions{left}, {spent}{why}"
    names = search.plan.sweep.search.objectives if search.plan.sweep.search else ()
    for point in search.best():
        values = zip(names, point.observation.values, strict=True)
        found = ", ".join(f"{name} {value:.6g}" for name, value in values)
        patch = ", ".join(f"{key}: {format_value(value)}" for key, value in point.patch.items())
        yield f"best {point.level} ({point.trial_id[:8]})  {found}  {patch}"


def promote_trials(search: Searcher, store: Store, trials: list[str]) -> None:
    """Lets pruned trials, by the first digits of their ids, be trained to their end.

    Raises:
        UsageError: one is no pruned trial of this search.
    """
    for trial in trials:
        search.promote(store.find_trial(trial))


def _in_parentheses(words: list[str]) -> str:
    return f" ({', '.join(words)})" if words else ""
