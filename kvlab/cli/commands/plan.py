"""`kvlab plan`: list the trials of a sweep with their cost and state. Imports no torch."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from kvlab.cli import shared_arguments as shared
from kvlab.cli.terminal import format_table, print_result
from kvlab.errors import StoreError, UsageError
from kvlab.humanize import format_bytes, format_count, format_duration, format_number
from kvlab.layout.gpu_sharing import describe_sharing
from kvlab.machine import cpu_count, host_memory
from kvlab.own_extensions import find_member, find_members
from kvlab.spec.experiment import Experiment
from kvlab.spec.size_config import MAX_EXTRAPOLATION, count_size_parameters, describe_matching
from kvlab.store import Store
from kvlab.store.result import flatten
from kvlab.sweep import Plan, PlannedTrial, Stage, plan_stage
from kvlab.sweep.driver.retiming import announce_retiming, plan_retiming
from kvlab.sweep.planning.budget import Budget, MachineMemory, estimate_budget
from kvlab.sweep.planning.code_review import CodeReview, review_code
from kvlab.sweep.planning.planner import SweepPlanner
from kvlab.sweep.planning.stages import plan_at_least, plan_at_most

Levels = Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_record(parser, "name or file of a sweep")
    shared.add_scale(parser)
    text = "training FLOPs per second of one trial (default: measured from finished trials)"
    parser.add_argument("--rate", type=shared.positive_float, metavar="FLOPS", help=text)
    text = "price of one GPU or CPU core per hour"
    parser.add_argument("--price", type=shared.positive_float, help=text)
    shared.add_memory(parser, "warns of trainings that exceed it (default on CPU: this machine's)")
    for add_option in find_members("plan_options").values():
        add_option(parser)


def run(options: argparse.Namespace) -> None:
    store = Store(options.store)
    sweep = shared.read_sweep(options.sweep, options.scale)
    stage = plan_stage(sweep, store, provisional=True)
    planner = SweepPlanner(sweep, store, provisional=True)
    most, planned, least = plan_at_most(planner), stage.plan, plan_at_least(stage, planner)
    described = [*_format_plan(planned)]  # refuses a wrong search before anything is measured
    costs = _estimate_costs(least, store, options)
    most_costs = None if most is None else _estimate_costs(most, store, options)
    looks = find_members("plan_outlooks").items()
    outlooks = {name: look(stage, least, store, options) for name, look in looks}
    retiming, code = _describe_retiming(planned, store), review_code(stage, store)
    facts = {**_collect_facts(planned), "budget": costs and asdict(costs)}
    if most is not None:
        at_most = {"trials": len(most.trials), "trainings": most.training_count}
        facts["at_least"] = {"trials": len(least.trials), "trainings": least.training_count}
        facts["at_most"] = {**at_most, "budget": most_costs and asdict(most_costs)}
        facts["stage"] = {"name": stage.name, "number": stage.number, "is_last": stage.is_last}
    facts |= {name: own for name, (own, _) in outlooks.items()}
    facts["retiming"] = retiming
    facts["code"] = asdict(code) | {"is_mixing": code.is_mixing}
    lines = [
        *described,
        *stage.found,
        *(line for _, own in outlooks.values() for line in own),
        *(_format_budget(costs) if costs else []),
        *([f"Timings: {retiming}."] if retiming else []),
        *_format_code(code),
        *(_format_stage(stage, least, most, most_costs) if most is not None else []),
    ]
    print_result(options, facts, "\n".join(lines))


def _estimate_costs(planned: Plan, store: Store, options: argparse.Namespace) -> Budget | None:
    """Return the budget of what is missing, None if nothing is."""
    memory = options.memory
    if memory is None and not any(p.trial.experiment.resources.devices for p in planned.trials):
        memory = host_memory()  # GPUs may be elsewhere
    text = "measuring how fast this machine trains, for the time; once, some seconds"
    return estimate_budget(
        planned,
        store,
        rate=options.rate,
        price=options.price,
        memory=memory,
        at_once=_count_concurrent_trials(planned),
        on_calibration=lambda: print(text, file=sys.stderr, flush=True),
    )


def _describe_retiming(planned: Plan, store: Store) -> str:
    """Return whether trials are timed again at the end, and why; empty if this needs no word."""
    if any(not one.has_ended for one in planned.trials):
        return announce_retiming(planned, _count_concurrent_trials(planned))
    with contextlib.suppress(UsageError, StoreError):  # no description, or a damaged one
        return plan_retiming(planned, store)[1]
    return ""


def _count_concurrent_trials(planned: Plan) -> int:
    """Return how many trials share the memory of this machine or of one GPU if Ray runs them."""
    machine = MachineMemory(0, 0, cpu_count())
    most = max(machine.at_once(one.trial.experiment.resources) for one in planned.trials)
    search = planned.sweep.search
    return most if search is None else min(most, search.parallel)


def _format_plan(planned: Plan) -> Iterator[str]:
    """Yield the trials as a table, then what there is to know of the design and its totals."""
    sweep, trials = planned.sweep, planned.trials
    yield _format_trials(planned)
    yield ""
    for cell, first, reason in _find_equal_cells(planned):
        yield f"{_format_label(cell)} computes the same as {_format_label(first)} ({reason})."
    if sweep.search is not None:
        yield from find_member("search", "space")(sweep)
    yield from (f"Sizes: {line}." for line in describe_matching(sweep))
    yield from (f"{rule}." for rule in sweep.selection.rules)
    yield from (f"Aliasing: {note}." for note in sweep.selection.notes)
    if sweep.size is not None:
        counts = count_size_parameters(sweep, sweep.cells())
        sizes = ", ".join(f"{level} {count:,}" for level, count in counts.items())
        limit = format_number(MAX_EXTRAPOLATION * max(counts.values()))
        text = f"Sizes by {sweep.size.factor}: {sizes} parameters without embeddings, with the"
        yield f"{text} output head; effects can be predicted up to {limit}."
    resources = [one.trial.experiment.resources for one in trials]
    if any(one.shares_gpu or one.gpus == "auto" for one in resources):
        yield f"GPUs: {describe_sharing()}."
    yield planned.format_totals() + "."
    states = ", ".join(f"{number} {state}" for state, number in planned.count_states().items())
    yield f"State: {states}."
    if sweep.scales:
        others = " or ".join(f"--scale {name}" for name in sweep.scales)
        yield f"Scale: the file's own; for another, {others}."
    yield from (f"Note: {note}." for note in planned.notes)
    yield from (f"Not here yet, so the ids will change: {why}." for why in planned.absent)


def _format_trials(planned: Plan) -> str:
    sweep, trials = planned.sweep, planned.trials
    factors = list(trials[0].levels)  # with a setting, while it is found
    has_width = sweep.match != "none"
    head = [*factors, "seed", "trial", *(["ffn_dim"] if has_width else [])]
    rows = [[*head, "parameters", "KV/token", "KV/block", "FLOPs", "state"]]
    off = {tuple(cell.levels.values()): cell.off for cell in planned.cells}
    for one in trials:
        inapplicable = off.get(tuple(one.levels[factor] for factor in sweep.factors)) or ()
        state = _describe_state(one)
        if one.code.compare() == "other":
            state += ", other code" if one.has_ended else ", goes on from other code"
        rows.append([
            *("-" if factor in inapplicable else level for factor, level in one.levels.items()),
            str(one.trial.seed),
            one.trial.id[:8],
            *([f"{one.trial.experiment.model.ffn_dim:,}"] if has_width else []),
            f"{one.parameters:,}",
            format_bytes(one.kv_bytes_per_token),
            format_bytes(one.kv_bytes),
            format_number(one.flops),
            state,
        ])  # fmt: skip
    return format_table(rows, "l" * len(factors) + "rl" + "r" * has_width + "rrrrl")


def _format_code(code: CodeReview) -> Iterator[str]:
    """Yield how many trials are of other code, and whether going on would mix it with this."""
    if found := code.describe():
        text = "to go on would mix code, so submit asks for --code rerun or --code mix"
        hint = "nothing would be mixed; submit --code rerun runs them again"
        yield f"Code: {found}; {text if code.is_mixing else hint}."


def _describe_state(one: PlannedTrial) -> str:
    if one.state == "shares training":
        return f"shares training of {one.shares_with[:8]}" if one.shares_with else "training exists"
    if one.state != "new":
        return one.state
    if one.branch.steps:
        source = one.branch.source[:8] if one.branch.source else "the store"
        return f"new, branches from {source} after step {one.branch.steps:,}"
    if one.starts_from:
        return f"new, after the training of {one.starts_from[:8]}"
    return f"new, from {start.name}" if (start := one.trial.initial_weights) else "new"


def _find_equal_cells(planned: Plan) -> Iterator[tuple[Levels, Levels, str]]:
    """Yield cells that compute the same as an earlier one, the earlier one, and the reason."""
    experiments = {tuple(c.levels.values()): c.experiment for c in planned.sweep.cells()}
    seen = set()
    for one in planned.trials:
        first = one.cells[0]
        for cell in one.cells[1:]:
            key = tuple(cell.values())
            if key not in seen:  # every seed repeats it
                seen.add(key)
                original = experiments[tuple(first.values())]
                yield cell, first, explain_equality(original, experiments[key])


def explain_equality(one: Experiment, other: Experiment) -> str:
    """Return which keys of two experiments that compute the same differ."""
    here, there = (
        dict(flatten(each.model_dump(mode="json", exclude={"name", "description"})))
        for each in (one, other)
    )
    differing = [key for key in {**there, **here} if here.get(key) != there.get(key)]
    return f"nothing that is computed depends on {', '.join(differing) or 'the level'} here"


def _format_label(levels: Levels) -> str:
    return " ".join(f"{factor}={level}" for factor, level in levels.items())


def _collect_facts(planned: Plan) -> dict[str, Any]:
    selection = planned.sweep.selection
    return {
        "sweep": planned.sweep.name,
        "text_absent": list(planned.absent),
        "notes": list(planned.notes),
        "design": {
            "cells": len(selection.cells),
            "designed": selection.designed,
            "rules": [asdict(rule) for rule in selection.rules],
            "notes": list(selection.notes),
        },
        "same": [
            {"cell": dict(cell), "as": dict(first), "why": reason}
            for cell, first, reason in _find_equal_cells(planned)
        ],
        "trials": [
            {
                "trial": one.trial.id,
                "training": one.trial.training_id,
                "seed": one.trial.seed,
                "cells": [dict(cell) for cell in one.cells],
                "parameters": one.parameters,
                "ffn_dim": one.trial.experiment.model.ffn_dim,
                "kv_bytes_per_token": one.kv_bytes_per_token,
                "kv_bytes_at_block_size": one.kv_bytes,
                "training_flops": one.flops,
                "training_tokens": one.tokens,
                "saved_tokens": one.saved_tokens,
                "branches_from": one.branch.source,
                "branches_at": one.branch.steps or None,
                "state": one.state,
                "code": one.code.compare(),
                "shares_with": one.shares_with,
                "starts_from": one.starts_from
                or (one.trial.initial_weights and one.trial.initial_weights.name),
            }
            for one in planned.trials
        ],
        "totals": {
            "trials": len(planned.trials),
            "trainings": planned.training_count,
            "states": planned.count_states(),
            "training_flops_to_do": planned.flops,
            "training_tokens_to_do": planned.tokens,
            "training_tokens_saved": planned.saved_tokens,
        },
    }


def _format_budget(costs: Budget) -> Iterator[str]:
    """Yield the totals of what is still to run."""
    low, high = costs.parameters
    sizes = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    counts = f"{format_count(costs.trials, 'trial')}, {format_count(costs.trainings, 'training')}"
    at_most = "at most " if costs.suggestions else ""
    text = f"Still to run: {at_most}{counts} of {sizes} parameters"
    yield f"{text}; training takes {_format_work(costs)}."
    if costs.suggestions:
        text = f"{costs.suggestions:,} of them are suggestions to come"
        yield f"{text}, each taken to cost what the base does."
    yield _format_memory(costs)
    yield _format_time(costs)
    if costs.money is not None:
        yield f"Money: {costs.money:,.2f}."


def _format_work(costs: Budget) -> str:
    return f"{format_number(costs.flops)} FLOPs, {format_number(costs.tokens)} tokens"


def _format_stage(stage: Stage, least: Plan, most: Plan, costs: Budget | None) -> Iterator[str]:
    """Yield where a sweep with several stages is, and the most that it may still take."""
    yield from (f"{line[:1].upper()}{line[1:]}." for line in stage.lines)
    if stage.is_last and not any(one.trains for one in stage.plan.trials):
        yield f"{stage.name[:1].upper()}{stage.name[1:]}: nothing more is to be decided."
        return
    counts = least.format_totals().partition(":")[0]
    yield f"This is {stage.name}, the least that the sweep takes: {counts}."
    yield f"The most, if nothing is decided before the last: {most.format_totals()}."
    if costs is not None:
        hours = costs.hours and f", {format_number(costs.hours)} {costs.device} hours"
        text = f"Then still to run: {format_count(costs.trials, 'trial')}; training takes"
        yield f"{text} {_format_work(costs)}{hours or ''}."


def _format_memory(costs: Budget) -> str:
    text = f"Predicted peak memory of a training: {format_bytes(costs.peak_bytes)}"
    text += f" ({costs.peak_trial[:8]}), and {format_bytes(costs.process_bytes)} of its process"
    if costs.memory is None:
        return f"{text}; state the GPU's with --memory to compare."
    if costs.at_once > 1:
        text += f"; {costs.at_once} at once take {format_bytes(costs.total_bytes)}"
    if costs.fits:
        return f"{text} of {format_bytes(costs.memory)}."
    hint = "lower resources.microbatch_tokens or the model, or run fewer at once"
    return f"{text}, more than the {format_bytes(costs.memory)} there are; {hint}."


def _format_time(costs: Budget) -> str:
    rate = costs.rate
    if rate is None:
        return "Time: not known; state a rate with --rate, or run a trial first."
    speed = f"{format_number(rate.flops_per_second, 'FLOP/s')} a trial, {_SOURCES[rate.source]}"
    if rate.results:
        speed += f" of {format_count(rate.results, 'finished trial')} here, under their load"
    if costs.hours is None or costs.wall_seconds is None:
        return f"Time: not known, as trials are on CPU and on GPU; {speed}."
    duration = f"about {format_duration(costs.wall_seconds)}"
    if rate.uncertainty is not None:
        ends = (costs.wall_seconds / rate.uncertainty, costs.wall_seconds * rate.uncertainty)
        duration += f" ({' to '.join(map(format_duration, ends))})"
    duration += f", {costs.at_once} trials at once" if costs.at_once > 1 else ""
    scope = "training alone"
    if rate.measure_seconds is not None:
        scope = f"with {format_duration(rate.measure_seconds)} of measuring a trial"
        scope += f", which leave out {' and '.join(rate.left_out)}" if rate.left_out else ""
    hours = f"{format_number(costs.hours)} {costs.device} hours"
    return f"Time: {duration}; {hours}, {scope}; {speed}."


_SOURCES = {
    "stated": "as stated",
    "measured": "the median",
    "machine": "by a short training on this machine, if nothing else uses it",
    "one core": "by a short training on one core, as others use this machine",
}
