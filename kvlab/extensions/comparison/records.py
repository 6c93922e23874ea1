"""Compare two records of one trial, made on different machines: what differs, and within what."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvlab.errors import UsageError
from kvlab.store.metrics import BEGINNINGS, METRICS
from kvlab.store.record_forms import read_if_whole
from kvlab.store.result import flatten
from kvlab.store.store import Store

Verdict = Literal["equal", "within", "beyond", "only in A", "only in B", "not compared"]

NOT_RECORDED = "not recorded"

_ENVIRONMENT = (
    "commit", "dirty", "code", "kvlab", "python", "platform", "versions", "device", "threads",
    "kernels", "timings", "command", "started", "finished", "attempts",
)  # fmt: skip

_COUNTS = ("steps", "tokens", "workers")
"""What is exact in the record of a training."""

TOLERANCES: dict[str, float] = {"nats/token": 2e-3, "nats": 2e-3, "bits/byte": 3e-3, "": 0.01}
"""By unit: largest difference of two records of one trial that were made on different hardware,
with another number of threads or without the CPU kernels. These round differently, and a training
multiplies roundings. Measured on eight quickstart-like trials, with kernels and plain: 4e-5
nats/token one-shot, 5e-4 where a cache is tied, and 0.0015 of the shares. One thread and two part
by 5e-7 (the quickstart's model, 64 steps). Two processors part by 0.0027 in a tied cell whose
serving costs 0.55: a cache that changes what is computed multiplies what parts (`GAP_TOLERANCE`).
The losses of two seeds differ by 0.02. Settings that
are part of a trial have no tolerance: on that model bfloat16 moved the loss by 0.007. A compiled
training and an eager one part by 3e-6 over 20 steps, and by 0.0001 and 0.0019 after 128 (two
seeds)."""

GAP_TOLERANCE = 0.01
"""Of a loss through the serving cache, more: as a share of the cell's serving gap."""

OTHER_TOLERANCE = 0.01
"""The same of units that are not in `TOLERANCES`, as a share of the value."""

_LOSS_UNITS = ("nats/token", "nats", "bits/byte")


@dataclass(frozen=True)
class TrialRecord:
    """A trial in one store.

    Attributes:
        training: The record of its training; empty if that is gone.
    """

    store: Store
    trial: str
    result: Mapping[str, Any]
    training: Mapping[str, Any]

    @classmethod
    def read(cls, store: Store, trial: str) -> "TrialRecord":
        """Read a trial, and check its files.

        Raises:
            UsageError: The trial has not ended.
            StoreError: A file is not what was written.
        """
        result = store.result(trial)
        if result is None:
            text = f"trial {trial} in {store.path} has no result"
            raise UsageError(f"{text}; compare trials that have ended")
        directory = store.training_directory(result["training"])
        return cls(store, trial, result, read_if_whole(directory / "training.json"))


@dataclass(frozen=True)
class Field:
    """A field that differs; None where it is not recorded."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class ComparedMetric:
    """One measurement of both records.

    Attributes:
        tolerance: Largest accepted difference; None for what is not compared.
    """

    name: str
    before: float | None
    after: float | None
    tolerance: float | None
    verdict: Verdict


@dataclass(frozen=True)
class RecordComparison:
    """Two records, field by field.

    Attributes:
        trials: The ids of A and of B.
        configuration: Fields of the experiment, the seed and the text that differ.
        environment: Fields of code, machine and time that differ.
        exact: Other fields that must agree and do not: status, layout of the cache, sizes, counts.
        metrics: Every measurement of either.
        files: Name of each sealed file of the training and the trial: whether both are the same,
            byte for byte.
    """

    trials: tuple[str, str]
    configuration: tuple[Field, ...]
    environment: tuple[Field, ...]
    exact: tuple[Field, ...]
    metrics: tuple[ComparedMetric, ...]
    files: Mapping[str, bool]

    @property
    def is_one_trial(self) -> bool:
        return self.trials[0] == self.trials[1]

    @property
    def beyond(self) -> tuple[ComparedMetric, ...]:
        """The compared ones that differ by more than is accepted, or that one record lacks."""
        accepted = ("equal", "within", "not compared")
        return tuple(one for one in self.metrics if one.verdict not in accepted)

    @property
    def agrees(self) -> bool:
        return self.is_one_trial and not self.exact and not self.beyond

    def count(self, verdict: Verdict) -> int:
        return sum(one.verdict == verdict for one in self.metrics)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "agrees": self.agrees}


def compare_records(one: TrialRecord, other: TrialRecord) -> RecordComparison:
    """Compare two records; they are of one trial if their ids are equal."""
    results = one.result, other.result
    made = [result.get("provenance") or {} for result in results]
    configurations: list[dict[str, Any]] = []
    exact: list[dict[str, Any]] = []
    for result, provenance in zip(results, made, strict=True):
        text, training = provenance.get("data") or {}, result.get("training_record") or {}
        digest = {"digest of the text": text["digest"]} if "digest" in text else {}
        experiment = result.get("experiment") or {}
        configurations.append({"seed": result.get("seed"), **experiment, **digest})
        error = {"error": result["error"].get("message")} if result.get("error") else {}
        counts = {key: training[key] for key in _COUNTS if key in training}
        sizes = {key: result.get(key) for key in ("kv", "model")}
        exact.append({"status": result["status"], **sizes, "training": counts, **error})
    environments = [{key: part[key] for key in _ENVIRONMENT if key in part} for part in made]
    before, after = (result.get("measurements") or {} for result in results)
    metrics, gap = [], min(abs(one.get("serving_gap", 0.0)) for one in (before, after))
    for name in METRICS.sort((*before, *after)):
        a, b = before.get(name), after.get(name)
        tolerance = find_tolerance(name, a if a is not None else b or 0.0, gap)
        metrics.append(ComparedMetric(name, a, b, tolerance, _judge(a, b, tolerance)))
    mine, theirs = (
        {**(trial.training.get("files") or {}), **trial.result.get("files", {})}
        for trial in (one, other)
    )
    return RecordComparison(
        (one.trial, other.trial),
        tuple(_differ(*configurations)),
        tuple(_differ(*environments)),
        tuple(_differ(*exact)),
        tuple(metrics),
        {name: mine[name] == theirs[name] for name in mine if name in theirs},
    )


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Field]:
    before, after = dict(flatten(one)), dict(flatten(other))
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Field(name, before.get(name), after.get(name))


def _judge(a: float | None, b: float | None, tolerance: float | None) -> Verdict:
    if tolerance is None:
        return "not compared"
    if a is None or b is None:
        return "only in B" if a is None else "only in A"
    if a == b:
        return "equal"
    return "within" if math.isfinite(a - b) and abs(a - b) <= tolerance else "beyond"


def find_tolerance(name: str, value: float, gap: float = 0.0) -> float | None:
    """Return how far two records of one trial may differ in a metric.

    Args:
        value: In one of them.
        gap: What serving costs its cell, in nats/token.

    Returns:
        0 for counts, which are exact. None for what measures the machine and is not compared.
    """
    if name.startswith(BEGINNINGS["of_the_machine"]):
        return None
    unit = METRICS[name].unit
    if unit in BEGINNINGS["exact_units"]:
        return 0.0
    tolerance = TOLERANCES.get(unit, OTHER_TOLERANCE * abs(value))
    of_the_cache = name.startswith(BEGINNINGS["of_the_cache"]) or "_served" in name
    if unit in _LOSS_UNITS and of_the_cache:
        tolerance += GAP_TOLERANCE * abs(gap)
    return tolerance
