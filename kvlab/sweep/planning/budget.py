"""Estimate what a plan still costs: memory, device-hours and money."""

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

MAX_RESULTS_READ = 64
"""Results that a rate is measured from."""

_MAX_TRIALS_SCANNED = 1000


@dataclass(frozen=True)
class TrainingRate:
    """The speed of one trial.

    Attributes:
        flops_per_second: Of its training.
        source: Whether a person stated it, or results gave it.
        results: Number of results that it was measured from.
        measure_seconds: Duration of the measurement stage; None if unknown.
    """

    flops_per_second: float
    source: Literal["stated", "measured"]
    results: int = 0
    measure_seconds: float | None = None


@dataclass(frozen=True)
class Budget:
    """What running a plan's missing trials takes.

    Attributes:
        trials: Number of missing trials, with the most that a search may still suggest.
        trainings: Number of them that train.
        parameters: Of the smallest and of the largest model.
        flops, tokens: Of the trainings.
        peak_bytes: Predicted, of the trial that takes most.
        peak_trial: Id of that trial.
        device: ``GPU`` or ``CPU core``; the unit of ``hours``.
        memory: Bytes of the device, if known.
        at_once: Number of trials that share the memory.
        suggestions: Number of trials that a search may still suggest.
        rate: None if unknown.
        hours: Device-hours; None without a rate, or if some trials use GPUs and some do not.
        money: ``hours`` times the price; None without a price.
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
        """Whether ``at_once`` of the largest trial fit into the memory; None if unknown."""
        return None if self.memory is None else self.peak_bytes * self.at_once <= self.memory


def estimate_budget(
    plan: Plan,
    store: Store | None,
    *,
    suggestions: int = 0,
    rate: float | None = None,
    price: float | None = None,
    memory: int | None = None,
    at_once: int = 1,
) -> Budget | None:
    """Estimate the budget of a plan.

    Args:
        suggestions: Number of trials that a search may still suggest. They are not known yet, and
            are taken to cost what the base experiment does.
        rate: Training FLOP/s of one trial; default measured from finished trials with the same
            resources.
        price: Of one device for one hour.
        memory: Bytes of the device.
        at_once: Number of trials that run side by side in that memory, if there are as many.

    Returns:
        None if nothing is left to run.

    Raises:
        UsageError: A price without any rate.
    """
    missing = [planned for planned in plan.trials if not planned.has_ended]
    missing += [replace(plan.trials[0], state="new")] * suggestions
    if not missing:
        return None
    training_rate = TrainingRate(rate, "stated") if rate else _measure_rate(plan, store, missing)
    hours = _device_hours(missing, training_rate)
    if price is not None and hours is None:
        text = f"--price = {price:g} needs a rate, and no finished trial here gives one"
        raise UsageError(f"{text}; state it with --rate FLOPS")
    peaks = {p.trial.id: training_peak_bytes(p.trial.experiment, memory) for p in missing}
    largest = max(peaks, key=lambda trial_id: peaks[trial_id])
    parameters = [planned.parameters for planned in missing]
    trainings = [planned for planned in missing if planned.trains]
    uses_gpus = any(planned.trial.resources.devices for planned in missing)
    return Budget(
        trials=len(missing),
        trainings=len(trainings),
        parameters=(min(parameters), max(parameters)),
        flops=sum(planned.flops_to_do for planned in trainings),
        tokens=sum(planned.tokens_to_do for planned in trainings),
        peak_bytes=peaks[largest],
        peak_trial=largest,
        device="GPU" if uses_gpus else "CPU core",
        memory=memory,
        at_once=min(at_once, len(missing)),
        suggestions=suggestions,
        rate=training_rate,
        hours=hours,
        money=None if price is None or hours is None else hours * price,
    )


def _device_hours(missing: list[PlannedTrial], rate: TrainingRate | None) -> float | None:
    kinds = {planned.trial.resources.devices > 0 for planned in missing}
    if rate is None or len(kinds) != 1:
        return None
    seconds = 0.0
    for planned in missing:
        resources = planned.trial.resources
        training = planned.flops_to_do / rate.flops_per_second if planned.trains else 0.0
        devices = resources.devices or resources.cpus
        seconds += (training + (rate.measure_seconds or 0.0)) * devices
    return seconds / 3600


def _measure_rate(
    plan: Plan, store: Store | None, missing: list[PlannedTrial]
) -> TrainingRate | None:
    """Return the median rate of finished trials that had the resources of this plan's."""
    resources = {planned.trial.resources for planned in missing}
    if store is None or len(resources) != 1:
        return None
    own = [planned.trial.id for planned in plan.trials if planned.state == "done"]
    others = (trial for trial in store.trial_ids()[:_MAX_TRIALS_SCANNED] if trial not in set(own))
    rates, measure_seconds = [], []
    for result in _results_with_resources(store, (*own, *others), next(iter(resources))):
        training, provenance = result["training_record"], result["provenance"]
        rates.append(result["model"]["training_flops"] / training["seconds"])
        if provenance["attempts"] == 1 and not training.get("resumed_from"):
            seconds = _seconds_between(provenance["started"], provenance["finished"])
            measure_seconds.append(seconds - training["seconds"])
        if len(rates) == MAX_RESULTS_READ:
            break
    if not rates:
        return None
    measured = max(0.0, median(measure_seconds)) if measure_seconds else None
    return TrainingRate(median(rates), "measured", len(rates), measured)


def _results_with_resources(
    store: Store, trials: Iterable[str], resources: ResourcesConfig
) -> Iterator[dict[str, Any]]:
    """Yield the readable results of done trials that trained with these resources."""
    for trial_id in trials:
        if store.status(trial_id) != "done":
            continue
        try:
            result = store.result(trial_id)
        except StoreError:
            continue
        training = (result or {}).get("training_record") or {}
        if result is None or not training.get("seconds") or not result["model"]["training_flops"]:
            continue
        used = result["experiment"]["resources"]
        if (used["gpus"], used["cpus"]) == (resources.gpus, resources.cpus):
            yield result


def _seconds_between(started: str, finished: str) -> float:
    return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
