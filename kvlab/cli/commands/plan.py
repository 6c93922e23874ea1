"""`kvlab plan`: every trial of a sweep, its cost, and how it stands. Imports no torch."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvlab.cli.budget import budget_lines, why_lines
from kvlab.cli.options import add_json, add_store
from kvlab.cli.search import space_lines
from kvlab.cli.sizes import memory_size, positive
from kvlab.cli.sweep_file import read_sweep
from kvlab.cli.table import short_number, table
from kvlab.errors import UsageError
from kvlab.sweep import Plan, PlannedTrial, plan
from kvlab.sweep.budget import budget
from kvlab.sweep.nearest import Nearest, nearest_finished
from kvlab.sweep.sameness import why_same
from kvlab.trial import Store

Levels = Mapping[str, str]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="a sweep's YAML file")
    add_store(parser)
    parser.add_argument(
        "--rate", type=positive, metavar="FLOPS",
        help="training FLOPs a second of one trial (default: measured from finished trials)",
    )  # fmt: skip
    parser.add_argument("--price", type=positive, help="of one GPU or CPU core for an hour")
    parser.add_argument(
        "--memory", type=memory_size,
        help="of the device, such as 80GB (default for CPU trials: this machine's)",
    )  # fmt: skip
    parser.add_argument(
        "--why", nargs="?", const="", metavar="TRIAL",
        help="in which fields a trial (default: the first to run) differs from the nearest"
        " finished one",
    )  # fmt: skip
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    store = Store(options.store)
    planned = plan(read_sweep(options.sweep), store, provisional=True)
    memory = options.memory or _this_memory(planned)
    costs = budget(
        planned, store, rate=options.rate, price=options.price, memory=memory,
        at_once=_at_once(planned),
    )  # fmt: skip
    why = None if options.why is None else _why(planned, store, options.why)
    if options.json:
        facts = {**_facts(planned), "budget": None if costs is None else asdict(costs)}
        if why is not None:
            facts["why"] = {"trial": why[0].trial.id, "nearest": why[1] and asdict(why[1])}
        print(json.dumps(facts, indent=1))
        return 0
    print("\n".join([*_lines(planned), *(budget_lines(costs) if costs else [])]))
    if why is not None:
        print("\n".join(why_lines(*why)))
    return 0


def _this_memory(planned: Plan) -> int | None:
    """Of this machine, where the trials run on CPU; a cluster's GPUs are not known here."""
    if any(one.trial.experiment.resources.devices for one in planned.trials):
        return None
    from kvlab.sweep.memory import host_memory

    return host_memory()


def _at_once(planned: Plan) -> int:
    """Trials that share this machine's memory, or that of one GPU, as Ray would run them here."""
    from kvlab.sweep.executors.machine import cpu_count
    from kvlab.sweep.memory import MachineMemory

    here = MachineMemory(0, 0, cpu_count())
    most = max(here.at_once(one.trial.experiment.resources) for one in planned.trials)
    search = planned.sweep.search
    return most if search is None else min(most, search.parallel)


def _why(planned: Plan, store: Store, prefix: str) -> tuple[PlannedTrial, Nearest | None]:
    found = [one for one in planned.trials if one.trial.id.startswith(prefix) and not one.ended]
    if not found:
        text = f"--why = {prefix}" if prefix else "--why"
        raise UsageError(f"{text} fits no trial that is still to run; see the plan's list")
    return found[0], nearest_finished(found[0].trial, store)


def _lines(planned: Plan) -> list[str]:
    factors = list(planned.sweep.factors)
    head = [*factors, "seed", "trial", "parameters", "KV/token", "KV/block", "FLOPs", "state"]
    off = {tuple(cell.levels.values()): cell.off for cell in planned.cells if cell.off}
    rows = [[*_levels(one.levels, off), *_columns(one)] for one in planned.trials]
    lines = [table([head, *rows], right="l" * len(factors) + "rlrrrrl"), ""]
    lines += [
        f"{_label(other)} computes the same as {_label(first)} ({why})."
        for other, first, why in _equal_cells(planned)
    ]
    if planned.sweep.search is not None:
        lines += space_lines(planned.sweep)
    chosen = planned.sweep.selection
    lines += [f"{rule}." for rule in chosen.rules]
    lines += [f"Aliasing: {note}." for note in chosen.notes]
    counts = ", ".join(f"{number} {state}" for state, number in planned.counts().items())
    lines.append(planned.totals() + ".")
    lines.append(f"State: {counts}.")
    lines += [f"Not here yet, so the ids will change: {why}" for why in planned.absent]
    return lines


def _levels(levels: Levels, off: Mapping[tuple[str, ...], frozenset[str]]) -> list[str]:
    """A cell's levels; ``-`` where a factor does not apply."""
    without = off.get(tuple(levels.values()), frozenset())
    return ["-" if factor in without else level for factor, level in levels.items()]


def _columns(one: PlannedTrial) -> list[str]:
    return [
        str(one.trial.seed),
        one.trial.id[:8],
        f"{one.parameters:,}",
        f"{one.kv_bytes_per_token:,} B",
        f"{one.kv_bytes:,} B",
        short_number(one.flops),
        _state(one),
    ]


def _state(one: PlannedTrial) -> str:
    if one.state == "new":
        start = one.trial.start
        if one.starts_from:
            return f"new, after the training of {one.starts_from[:8]}"
        return f"new, from {start.name}" if start else "new"
    if one.state != "shares training":
        return one.state
    return f"shares training of {one.shares_with[:8]}" if one.shares_with else "training exists"


def _equal_cells(planned: Plan) -> Iterator[tuple[Levels, Levels, str]]:
    """Cells that compute the same as an earlier one, which is in the table; and why."""
    experiments = {tuple(c.levels.values()): c.experiment for c in planned.sweep.cells()}
    told = set()
    for one in planned.trials:
        for other in one.cells[1:]:
            first, key = one.cells[0], tuple(other.values())
            if key not in told:
                told.add(key)
                why = why_same(experiments[tuple(first.values())], experiments[key])
                yield other, first, why


def _label(levels: Levels) -> str:
    return " ".join(f"{factor}={level}" for factor, level in levels.items())


def _facts(planned: Plan) -> dict[str, Any]:
    return {
        "sweep": planned.sweep.name,
        "text_absent": list(planned.absent),
        "design": {
            "cells": len(planned.sweep.selection.cells),
            "designed": planned.sweep.selection.designed,
            "rules": [asdict(rule) for rule in planned.sweep.selection.rules],
            "notes": list(planned.sweep.selection.notes),
        },
        "same": [
            {"cell": dict(other), "as": dict(first), "why": why}
            for other, first, why in _equal_cells(planned)
        ],
        "trials": [
            {
                "trial": one.trial.id,
                "training": one.trial.training_id,
                "seed": one.trial.seed,
                "cells": [dict(cell) for cell in one.cells],
                "parameters": one.parameters,
                "kv_bytes_per_token": one.kv_bytes_per_token,
                "kv_bytes_at_block_size": one.kv_bytes,
                "training_flops": one.flops,
                "training_tokens": one.tokens,
                "state": one.state,
                "shares_with": one.shares_with,
                "starts_from": one.starts_from or (one.trial.start and one.trial.start.name),
            }
            for one in planned.trials
        ],
        "totals": {
            "trials": len(planned.trials),
            "trainings": planned.trainings,
            "states": planned.counts(),
            "training_flops_to_do": planned.flops,
            "training_tokens_to_do": planned.tokens,
        },
    }
