"""What a plan costs and why a trial is not there yet, as `kvlab plan` prints it."""

from collections.abc import Iterator

from kvlab.cli.table import short_bytes, short_number
from kvlab.spec.problems import show_value
from kvlab.sweep import PlannedTrial
from kvlab.sweep.budget import Budget
from kvlab.sweep.nearest import Nearest
from kvlab.trial.progress import duration


def budget_lines(costs: Budget) -> Iterator[str]:
    """Totals of what is still to run."""
    low, high = costs.parameters
    sizes = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    work = f"{short_number(costs.flops)} FLOPs, {short_number(costs.tokens)} tokens"
    counts = f"{_count(costs.trials, 'trial')}, {_count(costs.trainings, 'training')}"
    at_most = "at most " if costs.suggestions else ""
    yield f"Still to run: {at_most}{counts} of {sizes} parameters; training takes {work}."
    if costs.suggestions:
        some = "is a suggestion" if costs.suggestions == 1 else "are suggestions"
        number = f"{costs.suggestions:,} of them {some} to come"
        yield f"{number}, each taken to cost what the base does."
    yield _memory(costs)
    yield _time(costs)
    if costs.money is not None:
        yield f"Money: {costs.money:,.2f}."


def why_lines(planned: PlannedTrial, nearest: Nearest | None) -> Iterator[str]:
    """In which fields a trial differs from the nearest finished one."""
    name = f"{planned.trial.id[:8]} ({planned.label} seed={planned.trial.seed})"
    if nearest is None:
        yield f"{name} has no result: the store has no finished trial at all."
        return
    if not nearest.differences:
        text = "asks for the same, and was made by an older version of kvlab's recipe"
        yield f"{name} has no result: {nearest.trial[:8]} {text} or measurement."
        return
    yield f"{name} has no result: the nearest finished trial, {nearest.trial[:8]}, differs in"
    for key, here, there in nearest.differences:
        yield f"  {key}: {show_value(here)} here, {show_value(there)} there"


def _memory(costs: Budget) -> str:
    text = f"Predicted peak memory of a training: {short_bytes(costs.peak_bytes)}"
    text += f" ({costs.peak_trial[:8]})"
    if costs.memory is None:
        return f"{text}; state the GPU's with --memory to compare."
    together, there = short_bytes(costs.peak_bytes * costs.at_once), short_bytes(costs.memory)
    beside = f"; {costs.at_once} at once take {together}" if costs.at_once > 1 else ""
    if costs.fits:
        return f"{text}{beside} of {there}."
    way_out = "lower resources.microbatch_tokens or the model"
    if beside:
        way_out += ", or give each more cores or more of a GPU, so that fewer run at once"
    return f"{text}{beside}{',' if beside else ' is'} more than the {there} there are; {way_out}."


def _time(costs: Budget) -> str:
    rate = costs.rate
    if rate is None:
        return "Time: not known; state a rate with --rate, or run a trial first."
    speed = f"{short_number(rate.flops_per_second)} FLOPs a second a trial"
    source = "stated" if rate.source == "stated" else f"median of {rate.results} finished here"
    rest = "training alone"
    if rate.measure_seconds is not None:
        rest = f"with {duration(rate.measure_seconds)} of measuring a trial"
    if costs.hours is None:
        return f"Time: not known, as trials are on CPU and on GPU; {speed} ({source})."
    return f"Time: {short_number(costs.hours)} {costs.device} hours, {rest}; {speed} ({source})."


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
