"""`kvlab status`: how far sweeps are, from the record alone, whoever drives them."""

import argparse
import json
from collections import Counter
from typing import Any

from kvlab.cli.live import ID_DIGITS, outcome_line
from kvlab.cli.options import add_json, add_store, sweep_name
from kvlab.cli.table import table
from kvlab.trial import Store
from kvlab.trial.progress import describe

STATES = ("done", "failed", "diverged", "pruned", "running", "missing")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", nargs="?", help="name or file; default: all")
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    if options.sweep is None:
        facts = [sweep_facts(store, name) for name in store.sweep_names()]
        print(json.dumps(facts, indent=1) if options.json else _overview(facts, options.store))
        return 0
    one = sweep_facts(store, sweep_name(options.sweep))
    print(json.dumps(one, indent=1) if options.json else _detail(one))
    return 0


def sweep_facts(store: Store, name: str) -> dict[str, Any]:
    """Counts by state, and every trial with its cell, state and one line about it."""
    sweep = store.sweep(name)
    trials: dict[str, dict[str, Any]] = {}
    for cell in sweep["cells"]:
        for seed, trial in cell["trials"].items():
            if trial not in trials:
                facts = {"trial": trial, "levels": cell["levels"], "seed": int(seed)}
                trials[trial] = {**facts, **_trial_facts(store, trial)}
    counts = Counter(facts["state"] for facts in trials.values())
    return {
        "sweep": name,
        "question": sweep["question"],
        "driven": store.is_driven(name),
        "states": {state: counts[state] for state in STATES if counts[state]},
        "trials": list(trials.values()),
    }


def _trial_facts(store: Store, trial: str) -> dict[str, Any]:
    status = store.status(trial)
    if status in ("failed", "diverged", "pruned"):
        return {"state": status, "detail": outcome_line(store, trial)}
    if status == "done":
        return {"state": status, "detail": ""}
    if store.is_running(trial):
        progress = store.progress(trial)
        return {"state": "running", "detail": describe(progress or {"stage": "starting"})}
    return {"state": "missing", "detail": "its result is damaged" if status else ""}


def _overview(facts: list[dict[str, Any]], store: str) -> str:
    if not facts:
        return f"{store} holds no sweep yet; start one with `kvlab submit SWEEP`"
    rows = [
        [
            one["sweep"],
            *(str(one["states"].get(state, 0)) for state in STATES),
            "yes" if one["driven"] else "no",
        ]
        for one in facts
    ]
    return table([["sweep", *STATES, "driver"], *rows], right="l" + "r" * len(STATES))


def _detail(one: dict[str, Any]) -> str:
    total = len(one["trials"])
    counts = ", ".join(f"{number} {state}" for state, number in one["states"].items())
    driver = "a driver is running" if one["driven"] else "no driver is running"
    lines = [f"{one['sweep']}: {total} trials: {counts}; {driver}"]
    for facts in one["trials"]:
        if facts["detail"]:
            cell = " ".join(f"{factor}={level}" for factor, level in facts["levels"].items())
            head = f"{facts['state']:<8} {facts['trial'][:ID_DIGITS]} {cell} seed={facts['seed']}"
            lines.append(f"{head}  {facts['detail']}")
    return "\n".join(lines)
