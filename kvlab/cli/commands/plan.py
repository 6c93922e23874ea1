"""`kvlab plan`: every trial of a sweep, its cost, and how it stands. Imports no torch."""

import argparse
import json
from typing import Any

from kvlab.cli.options import add_json, add_store
from kvlab.cli.table import short_number, table
from kvlab.spec import load_sweep
from kvlab.sweep import Plan, PlannedTrial, plan
from kvlab.trial import Store


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
    rows = [[*(one.levels[factor] for factor in factors), *_columns(one)] for one in planned.trials]
    lines = [table([head, *rows], right="l" * len(factors) + "rlrrrrl"), ""]
    lines += _equal_cells(planned)
    counts = ", ".join(f"{number} {state}" for state, number in planned.counts().items())
    lines.append(planned.totals() + ".")
    lines.append(f"State: {counts}.")
    lines += [f"Not here yet, so the ids will change: {why}" for why in planned.absent]
    if planned.flops:
        cost = f"{short_number(planned.flops)} FLOPs, {short_number(planned.tokens)} tokens"
        lines.append(f"Training still to do: {cost}.")
    return "\n".join(lines)


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


def _equal_cells(planned: Plan) -> list[str]:
    """Cells that compute the same as an earlier one, which is in the table."""
    lines = []
    for cells in dict.fromkeys(
        tuple(tuple(cell.items()) for cell in one.cells)
        for one in planned.trials
        if len(one.cells) > 1
    ):
        first, *others = (" ".join(f"{f}={level}" for f, level in cell) for cell in cells)
        lines += [f"{other} computes the same as {first}." for other in others]
    return lines


def _facts(planned: Plan) -> dict[str, Any]:
    return {
        "sweep": planned.sweep.name,
        "text_absent": list(planned.absent),
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
