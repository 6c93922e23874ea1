"""What is still to be spent on a plan: memory, device-hours and money."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from statistics import median
from typing import Any, Literal

from kvlab.errors import StoreError, UsageError
from kvlab.layout import training_peak_bytes
from kvlab.spec import ResourcesConfig
from kvlab.store import Store
from kvlab.sweep.planning.planner import Plan, PlannedTrial
from kvlab.sweep.search.search_history import Suggestion, load_history

MAX_RESULTS_READ = 64
"""Results that a rate is measured from."""

_MAX_TRIALS_SCANNED = 1000


@dataclass(frozen=True)
class TrainingRate:
    """How fast one trial trains, and how long it is measured afterwards.

    ``measure_seconds`` is None where it was never seen.
    """

    flops_per_second: float
    source: Literal["stated", "measured"]
    results: int = 0
    measure_seconds: float | None = None


@dataclass(frozen=True)
class Budget:
    """What running a plan's missing trials takes.

    Attributes:
        trials, trainings: to run, with the most that a search may suggest.
        suggestions: those of them that are a search's to come, costed as its base experiment.
        at_once: trials that share the memory.
        parameters: smallest and largest model among them.
        flops, tokens: of the trainings.
        peak_bytes: predicted, of the trial that takes most; ``peak_trial`` is its id.
        device: ``GPU`` or ``CPU core``: what hours are counted of.
        hours: devices times hours; None without a rate, or if trials mix CPU and GPU.
        money: ``hours`` times the price.
    """

    trials: int
    trainings: int
    parameters: tuple[int, int]
    flops: int
    tokens: int
    peak_bytes: int
    peak_trial: str
    device: str
    memory: int | None
    at_once: int
    suggestions: int
    rate: TrainingRate | None
    hours: float | None
    money: float | None

    @property
    def fits(self) -> bool | None:
        """Whether as many of the largest trial as run at once fit; None if that is not known."""
        return None if self.memory is None else self.peak_bytes * self.at_once <= self.memory


def estimate_budget(
    plan: Plan,
    store: Store | None,
    *,
    rate: float | None = None,
    price: float | None = None,
    memory: int | None = None,
    at_once: int = 1,
) -> Budget | None:
    """The budget of a plan; None if nothing is left to run.

    Args:
        rate: training FLOPs a second of one trial; default measured from the store's results of
            trials with the same resources.
        price: of one device for one hour.
        memory: bytes of the device.
        at_once: trials that run side by side in that memory, if there are as many.

    Raises:
        UsageError: a price without any rate.
        StoreError: the history of a search is damaged, or another search's.
    """
    missing, suggestions = list_remaining_trials(plan, store)
    if not missing:
        return None
    known = TrainingRate(rate, "stated") if rate else _measure_rate(plan, store, missing)
    hours = _device_hours(missing, known)
    if price is not None and hours is None:
        text = f"--price = {price:g} needs a rate, and no finished trial here gives one"
        raise UsageError(f"{text}; state it with --rate FLOPS")
    peaks = {p.trial.id: training_peak_bytes(p.trial.experiment, memory) for p in missing}
    largest = max(peaks, key=lambda trial: peaks[trial])
    sizes = [planned.parameters for planned in missing]
    gpus = any(planned.trial.experiment.resources.devices for planned in missing)
    return Budget(
        trials=len(missing),
        trainings=sum(planned.trains for planned in missing),
        parameters=(min(sizes), max(sizes)),
        flops=sum(planned.flops for planned in missing if planned.trains),
        tokens=sum(planned.tokens for planned in missing if planned.trains),
        peak_bytes=peaks[largest],
        peak_trial=largest,
        device="GPU" if gpus else "CPU core",
        memory=memory,
        at_once=min(at_once, len(missing)),
        suggestions=suggestions,
        rate=known,
        hours=hours,
        money=None if price is None or hours is None else hours * price,
    )


def _device_hours(missing: list[PlannedTrial], rate: TrainingRate | None) -> float | None:
    kinds = {planned.trial.experiment.resources.devices > 0 for planned in missing}
    if rate is None or len(kinds) != 1:
        return None
    seconds = 0.0
    for planned in missing:
        resources = planned.trial.experiment.resources
        own = planned.flops / rate.flops_per_second if planned.trains else 0.0
        seconds += (own + (rate.measure_seconds or 0.0)) * (resources.devices or resources.cpus)
    return seconds / 3600


def _measure_rate(
    plan: Plan, store: Store | None, missing: list[PlannedTrial]
) -> TrainingRate | None:
    """The median rate of finished trials with the resources of this plan's."""
    wanted = {planned.trial.experiment.resources for planned in missing}
    if store is None or len(wanted) != 1:
        return None
    own = [planned.trial.id for planned in plan.trials if planned.state == "done"]
    others = (trial for trial in store.trial_ids()[:_MAX_TRIALS_SCANNED] if trial not in set(own))
    rates, rests = [], []
    for result in _results_with_resources(store, (*own, *others), next(iter(wanted))):
        seconds = result["training_record"]["seconds"]
        rates.append(result["model"]["training_flops"] / seconds)
        facts = result["provenance"]
        if facts["attempts"] == 1 and not result["training_record"].get("resumed_from"):
            rests.append(_seconds_between(facts["started"], facts["finished"]) - seconds)
        if len(rates) == MAX_RESULTS_READ:
            break
    if not rates:
        return None
    rest = max(0.0, median(rests)) if rests else None
    return TrainingRate(median(rates), "measured", len(rates), rest)


def _results_with_resources(
    store: Store, trials: Iterable[str], wanted: ResourcesConfig
) -> Iterator[dict[str, Any]]:
    """Readable results of done trials that trained with the wanted resources."""
    for trial in trials:
        if store.status(trial) != "done":
            continue
        try:
            result = store.result(trial)
        except StoreError:
            continue
        record = (result or {}).get("training_record") or {}
        if result is None or not record.get("seconds") or not result["model"]["training_flops"]:
            continue
        asked = result["experiment"]["resources"]
        if (asked["gpus"], asked["cpus"]) == (wanted.gpus, wanted.cpus):
            yield result


def _seconds_between(started: str, finished: str) -> float:
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()


# What a plan still has to run: its trials that have not ended, and what its search may suggest.


def list_remaining_trials(plan: Plan, store: Store | None) -> tuple[list[PlannedTrial], int]:
    """The trials still to run, and how many of them are suggestions that nobody has made yet.

    A suggestion is taken to cost what the base experiment does: it is not known before it is
    made. There are at most as many as the budgets of trials and FLOPs allow; a budget of hours
    alone says nothing about their number, and then none is counted.

    Raises:
        StoreError: the history of the search is damaged, or another search's.
    """
    missing = [planned for planned in plan.trials if not planned.has_ended]
    if plan.sweep.search is None:
        return missing, 0
    suggested = list(_remaining_suggestions(plan, store))
    return missing + suggested, len(suggested)


def _remaining_suggestions(plan: Plan, store: Store | None) -> Iterator[PlannedTrial]:
    config, base = plan.sweep.search, replace(plan.trials[0], state="new")
    assert config is not None, "asked for by `outstanding`"
    points: list[Suggestion] = []
    if store is not None:
        points, _ = load_history(store.sweep_directory(plan.sweep.name) / "search.json", config)
    trained = [point for point in points if point.trained]
    left = []
    if config.trials is not None:
        left.append(config.trials - len(trained))
    if config.flops is not None:  # the one that passes the budget is still trained
        spent = sum(point.flops for point in trained)
        left.append(math.ceil((config.flops - spent) / max(1, base.flops)))
    unended = sum(point.past.state == "open" for point in trained)
    for _ in range(max(0, min(left, default=0)) + unended):
        yield base
