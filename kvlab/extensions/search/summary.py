"""A search in the terminal: its space, its best trials, and the sweep that confirms them."""

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import yaml

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.errors import RecordDamaged, SpecError, UsageError
from kvlab.extensions.search.optuna_sampler import check_search, objective_direction
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import format_number, summarize_error
from kvlab.spec import Sweep, load_sweep
from kvlab.spec.search_config import format_setting, format_settings, split_sampler
from kvlab.store.metrics import METRICS

MAX_TRIALS = 3
"""Trials that a confirmation compares with the base experiment, at most; of a front, one more."""

SEEDS = 5

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
        yield f"Search {key} in {', '.join(map(format_setting, values))}."
    for key, interval in search.ranges.items():
        flags = [name for name in ("log", "whole") if getattr(interval, name)]
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
    sampler += _in_parentheses(
        [f"{key}: {format_setting(value)}" for key, value in settings.items()]
    )
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


# The sweep that confirms the best trials on seeds that the search has not seen


def choose_trials(search: SearchResults) -> tuple[SuggestedTrial, ...]:
    """Return the trials that deserve fresh seeds: the best few, or the front spread out."""
    if len(search.objectives) == 1:
        return tuple(search.ranked(0)[:MAX_TRIALS])
    front, count = search.best, MAX_TRIALS + 1
    if len(front) <= count:
        return front
    step = (len(front) - 1) / (count - 1)
    return tuple(front[round(step * index)] for index in range(count))


def sweep_path(study: Study) -> str:
    """Return where the sweep belongs: beside the search's own file, as it was submitted."""
    words = str(study.sweep.get("command") or "").split()
    folder = next((PurePosixPath(w).parent for w in words if w.endswith((".yaml", ".yml"))), None)
    return str((folder or PurePosixPath("sweeps")) / f"{study.name}-confirm.yaml")


def sweep_yaml(study: Study, search: SearchResults) -> str:
    """Return a sweep that compares the best trials with the base experiment on fresh seeds.

    It belongs into the folder of the search's own file.

    Returns:
        Empty if no trial is eligible.
    """
    if not search.eligible:
        return ""
    try:
        document = yaml.safe_load(str(study.sweep.get("yaml") or "")) or {}
        document |= document.get("scales", {}).get(study.sweep.get("scale"), {})
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        text = f"the record of {study.name} has no sweep as its text ({summarize_error(error)})"
        raise RecordDamaged(f"{text}; submit the sweep again, which writes it anew") from error
    first = max(study.seeds, default=0) + 1
    lines = [
        f"# Do the best trials of the search {study.name} hold on seeds that it has not seen?",
        f"question: {json.dumps(f'Do the best trials of {study.name} hold on fresh seeds?')}",
        f"experiment: {json.dumps(str(document.get('experiment', 'experiment.yaml')))}",
        "factors:",
        "  configuration:",
        "    base: {}",
    ]
    for one in choose_trials(search):
        settings = ", ".join(f"{key}: {json.dumps(value)}" for key, value in one.settings.items())
        lines.append(f"    trial-{one.number}: {{{settings}}}")
    lines.append(f"seeds: {list(range(first, first + SEEDS))}")
    measured = [one.name for one in search.objectives if one.name in METRICS]
    if measured and measured[0] != "loss_served":  # what sweeps decide by default
        lines.append(f"decide: {{metric: {measured[0]}}}")
    return "\n".join(lines) + "\n"


def write_confirmation(study: Study, path: Path) -> None:
    """Write the sweep of `sweep_yaml` to a file that does not exist yet.

    Raises:
        UsageError: The sweep is no search or has no trial to confirm, the file exists, or the base
            experiment cannot be found from its folder.
    """
    search, name = study.search, study.name
    if search is None:
        raise UsageError(f"--confirm = {path} is for searches, and {name} is none; leave it out")
    text = sweep_yaml(study, search)
    if not text:
        rule = f"needs a measured trial within the limits, and {name} has none yet"
        raise UsageError(f"--confirm = {path} {rule}; submit the search again to go on")
    if path.suffix not in (".yaml", ".yml") or path.exists():
        rule = "exists already" if path.exists() else "is not a .yaml file"
        raise UsageError(f"--confirm = {path} {rule}; name a new one, such as {name}-confirm.yaml")
    write_atomic(path, text)
    try:
        load_sweep(path)
    except SpecError as error:
        path.unlink()
        reason = error.problems[0].message if error.problems else str(error)
        hint = f"name a file in the folder of the sweep {name}"
        raise UsageError(f"--confirm = {path} would not load: {reason}; {hint}") from None
