"""`kvlab status`: show how far sweeps are, from the record alone, whoever drives them."""

import argparse
from typing import Any

from kvlab.analysis.search_results import SearchResults, describe_levels
from kvlab.cli.progress_display import ID_DIGITS, format_outcome
from kvlab.cli.shared_arguments import ALL_SWEEPS, add_record, open_store, sweep_name
from kvlab.cli.terminal import format_table, print_result
from kvlab.humanize import format_count, format_duration, sanitize_line
from kvlab.own_extensions import find_member, name_members
from kvlab.store import Store
from kvlab.store.attempt import format_progress
from kvlab.store.record_forms import refuse_malformed
from kvlab.store.store import list_cells
from kvlab.sweep.driver.sweep_progress import estimate_pace, list_durations
from kvlab.trial.code_identity import TrialCode

STATES = ("done", "failed", "diverged", "pruned", "running", "missing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_record(parser, ALL_SWEEPS, archive=True)


def run(options: argparse.Namespace) -> None:
    store = open_store(options.store)
    if options.sweep is not None:
        facts = collect_sweep_facts(store, sweep_name(options.sweep))
        print_result(options, facts, _format_sweep(facts))
        return
    sweeps = [collect_sweep_facts(store, name) for name in store.sweep_names()]
    rows = [["sweep", *STATES, "driver"]]
    for facts in sweeps:
        counts = [str(facts["states"].get(state, 0)) for state in STATES]
        rows.append([facts["sweep"], *counts, "yes" if facts["driven"] else "no"])
    text = f"{options.store} holds no sweep yet; start one with `kvlab submit SWEEP`"
    text = format_table(rows, right="l" + "r" * len(STATES)) if sweeps else text
    print_result(options, sweeps, text)


def collect_sweep_facts(store: Store, name: str) -> dict[str, Any]:
    """Return the counts by state, and every trial with its cell, state and details."""
    sweep = store.sweep(name)
    trials: dict[str, dict[str, Any]] = {}
    with refuse_malformed(name):
        search = []
        if sweep.get("search") and name_members("search"):
            search = list(find_member("search", "summary")(SearchResults(sweep["search"])))
        for cell in list_cells(sweep):
            for seed, trial in cell["trials"].items():
                if trial not in trials:
                    facts = {"trial": trial, "levels": cell["levels"], "seed": int(seed)}
                    facts["settings"] = describe_levels(sweep, cell["levels"])
                    trials[trial] = {**facts, **_collect_trial_facts(store, trial)}
        by_state = {s: [t for t, own in trials.items() if own["state"] == s] for s in STATES}
        counts = {state: len(own) for state, own in by_state.items() if own}
        running = [store.progress(trial) or {} for trial in by_state["running"]]
        durations = list_durations(store, by_state["done"])
        pace = estimate_pace(running, durations, len(by_state["missing"]))
        drivers = [lock.describe_holder() for lock in store.held_driver_locks(name)]
        return {
            "sweep": name,
            "question": sweep["question"],
            "stage": (sweep.get("stages") or {}).get("name"),
            "driven": bool(drivers),
            "drivers": drivers,
            "states": counts,
            "other_code": sum(own.get("code") == "other" for own in trials.values()),
            "pace": pace,
            **({"search": search} if search else {}),
            "trials": list(trials.values()),
        }


def _collect_trial_facts(store: Store, trial: str) -> dict[str, Any]:
    status = store.status(trial)
    if status in STATES:
        detail = "" if status == "done" else format_outcome(store, trial)
        code = TrialCode.of(store.code(trial)).compare()
        return {"state": status, "detail": detail, "code": code}
    if store.is_running(trial):
        progress = store.progress(trial)
        return {"state": "running", "detail": format_progress(progress or {"stage": "starting"})}
    return {"state": "missing", "detail": "its result is damaged" if status else ""}


def _format_sweep(facts: dict[str, Any]) -> str:
    counts = ", ".join(f"{number} {state}" for state, number in facts["states"].items())
    drivers = facts["drivers"]
    driven = f"driven by {' and by '.join(drivers)}" if drivers else "no driver is running"
    total = len(facts["trials"])
    lines = [f"{facts['sweep']}: {total} trials: {counts or 'none began'}; {driven}"]
    pace, parts = facts["pace"], []
    if pace["trials_per_hour"]:
        parts.append(f"{pace['trials_per_hour']:,.3g} trials an hour")
    if pace["tokens_per_second"]:
        parts.append(f"{pace['tokens_per_second']:,.0f} tokens/s in training")
    if pace["seconds_left"] is not None:
        parts.append(f"about {format_duration(pace['seconds_left'])} left")
    lines += [f"rate: {', '.join(parts)}"] if parts else []
    lines += [f"stage: {facts['stage']}"] if facts.get("stage") else []
    if count := facts["other_code"]:
        text = f"code: {format_count(count, 'trial')} ran other code than this"
        lines.append(f"{text}; `kvlab plan {facts['sweep']}` lists them")
    lines += facts.get("search", [])
    for trial in facts["trials"]:
        if trial["detail"]:
            label = f"{trial['trial'][:ID_DIGITS]} {trial['settings']} seed={trial['seed']}"
            lines.append(f"{trial['state']:<8} {sanitize_line(label)}  {trial['detail']}")
    return "\n".join(lines)
