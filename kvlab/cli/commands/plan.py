"""`kvlab plan`: every trial of a sweep, its cost, and how it stands. Imports no torch."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvlab.cli.options import add_json, add_store
from kvlab.cli.table import short_number, table
from kvlab.spec import load_sweep
from kvlab.sweep import Plan, PlannedTrial, plan
from kvlab.sweep.sameness import why_same
from kvlab.trial import Store

Levels = Mapping[str, str]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", metavar="SWEEP", help="a sweep's YAML file")
    add_store(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    planned = plan(load_sweep(options.sweep), Store(options.store), provisional=True)
    print(json.dumps(_facts(planned), indent=1) if options.json else _text(planned))
    return 0


def _text(planned: Plan) -> str:
    factors = list(planned.sweep.factors)
    head = [*factors, "seed", "trial", "parameters", "KV/token", "KV/block", "FLOPs", "state"]
    off = {tuple(cell.levels.values()): cell.off for cell in planned.cells if cell.off}
    rows = [[*_levels(one.levels, off), *_columns(one)] for one in planned.trials]
    lines = [table([head, *rows], right="l" * len(factors) + "rlrrrrl"), ""]
    lines += [
        f"{_label(other)} computes the same as {_label(first)} ({why})."
        for other, first, why in _equal_cells(planned)
    ]
    chosen = planned.sweep.selection
    lines += [f"{rule}." for rule in chosen.rules]
    lines += [f"Aliasing: {note}." for note in chosen.notes]
    counts = ", ".join(f"{number} {state}" for state, number in planned.counts().items())
    lines.append(planned.totals() + ".")
    lines.append(f"State: {counts}.")
    lines += [f"The text is not here yet, so the ids will change: {why}" for why in planned.absent]
    if planned.flops:
        cost = f"{short_number(planned.flops)} FLOPs, {short_number(planned.tokens)} tokens"
        lines.append(f"Training still to do: {cost}.")
    return "\n".join(lines)


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
