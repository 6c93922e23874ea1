"""The sweep that confirms the best trials of a search on seeds that the search has not seen."""

import json
from pathlib import Path, PurePosixPath

import yaml

from kvlab.analysis.search_results import SearchResults, SuggestedTrial
from kvlab.analysis.study import Study
from kvlab.errors import RecordDamaged, SpecError, UsageError
from kvlab.fs.atomic_files import write_atomic
from kvlab.humanize import summarize_error
from kvlab.spec import load_sweep
from kvlab.store.metrics import METRICS

MAX_TRIALS = 3
"""Trials that a confirmation compares with the base experiment, at most; of a front, one more."""

SEEDS = 5


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
