"""Build `result.json` and `trial.json`, which reports and MLflow runs are made from.

A `Failure` says why a trial has no measurements.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kvlab.errors import (
    DataError,
    Diverged,
    MeasurementError,
    PretrainedError,
    ResourceError,
    SourceMissing,
)
from kvlab.layout import KVLayout, parameter_count, training_flops
from kvlab.oom import classify_oom
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.store.metrics import METRICS
from kvlab.store.provenance import DataProvenance, Machine, redact_paths

FailureClass = Literal[
    "bug", "diverged", "device_memory", "host_memory", "data", "resources", "source", "killed"
]
"""``device_memory`` and ``host_memory``: it ran out. ``source``: the weights that the training
starts from are unavailable or do not fit."""

_CLASSES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureClass], ...] = (
    (Diverged, "diverged"),
    (DataError, "data"),
    (ResourceError, "resources"),
    ((SourceMissing, PretrainedError), "source"),
)
_MEMORY_CLASSES: dict[str, FailureClass] = {"device": "device_memory", "host": "host_memory"}

OUT_OF_MEMORY: tuple[FailureClass, ...] = ("device_memory", "host_memory")


@dataclass(frozen=True)
class Failure:
    """One failure, as the record keeps it; ``traceback`` is relative to the trial's directory."""

    kind: FailureClass
    type: str
    message: str
    traceback: str | None = None

    @classmethod
    def from_error(cls, error: BaseException, traceback: str | None = None) -> "Failure":
        message = redact_paths(str(error))
        return cls(classify_error(error), type(error).__name__, message, traceback)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Failure":
        return cls(data["class"], data["type"], data["message"], data["traceback"])

    def as_dict(self) -> dict[str, str | None]:
        """Return the ``error`` of a result."""
        facts = {"type": self.type, "message": self.message, "traceback": self.traceback}
        return {"class": self.kind, **facts}


def classify_error(error: BaseException) -> FailureClass:
    """Return the class of an error that ended a trial; an unknown one is a bug."""
    for types, kind in _CLASSES:
        if isinstance(error, types):
            return kind
    out_of_memory = classify_oom(error)
    return _MEMORY_CLASSES[out_of_memory] if out_of_memory else "bug"


class RecordedTrial(Protocol):
    """What the record keeps of a trial. `kvlab.trial.Trial` is one."""

    @property
    def id(self) -> str: ...

    @property
    def training_id(self) -> str: ...

    @property
    def trunk_id(self) -> str | None: ...

    @property
    def experiment(self) -> Experiment: ...

    @property
    def seed(self) -> int: ...

    @property
    def data_identity(self) -> str: ...


@dataclass(frozen=True)
class TrialMeasurements:
    """What the stages of a trial measured.

    Attributes:
        measurements: numbers by the names of `METRICS`.
        curves: ``train_loss`` and ``validation_loss``, each ``[[step, tokens, loss], ...]``.
        training_record: steps, tokens, seconds and so on of the training; ``start`` says
            where its initial weights came from, and what became of each.
        items: HellaSwag results, one per item.
        texts: losses by document, see `kvlab.store.Store.texts`.
        tasks: outcomes on lm-eval tasks, see `kvlab.store.Store.tasks`.
        benchmark: lines of the benchmark, see `kvlab.benchmark.measurement`.
        needle: lines of the needle probe, one per length and depth.

    Raises:
        MeasurementError: a measurement is not in `METRICS`, or is not finite.
    """

    measurements: dict[str, float | int]
    curves: dict[str, list[list[float]]]
    training_record: dict[str, Any]
    machine: Machine
    data: DataProvenance
    items: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    tasks: dict[str, Any] = field(default_factory=dict)
    benchmark: list[dict[str, Any]] = field(default_factory=list)
    needle: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, value in self.measurements.items():
            if name not in METRICS:
                raise MeasurementError(f"{name} is measured but not in the table of metrics")
            if not math.isfinite(value):
                raise MeasurementError(f"{name} = {value} is not finite, so it cannot be compared")


def build_result(
    trial: RecordedTrial,
    status: Literal["done", "failed", "diverged", "pruned"],
    provenance: dict[str, Any],
    *,
    measured: TrialMeasurements | None = None,
    failure: Failure | None = None,
    pruned: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the contents of `result.json`.

    Args:
        provenance: see `build_provenance`.
        measured: of a ``done`` trial.
        failure: of a ``failed`` or ``diverged`` trial.
        pruned: step, steps and loss at which a search stopped a ``pruned`` trial.
    """
    assert (measured is None) == (status != "done"), "exactly the done trials are measured"
    return {
        "trial": trial.id,
        "training": trial.training_id,
        "status": status,
        "seed": trial.seed,
        "experiment": describe_experiment(trial.experiment),
        "kv": describe_kv(trial.experiment, provenance.get("weights", MODEL_DTYPE)),
        "model": {
            "parameters": parameter_count(trial.experiment.model),
            "training_flops": training_flops(trial.experiment),
        },
        "measurements": measured.measurements if measured else {},
        "curves": measured.curves if measured else {"train_loss": [], "validation_loss": []},
        "benchmark": measured.benchmark if measured else [],
        **({"needle": measured.needle} if measured and measured.needle else {}),
        "training_record": measured.training_record if measured else None,
        "error": failure.as_dict() if failure else None,
        **({"pruned": dict(pruned)} if pruned else {}),
        "provenance": provenance,
    }


def describe_trial(trial: RecordedTrial) -> dict[str, Any]:
    """Return the contents of `trial.json`: what is known of a trial before it runs."""
    return {
        "trial": trial.id,
        "training": trial.training_id,
        **({"trunk": trial.trunk_id} if trial.trunk_id else {}),
        "seed": trial.seed,
        "data_identity": trial.data_identity,
        "experiment": describe_experiment(trial.experiment),
    }


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """Return the configuration as plain data, with absolute paths cut to their last name."""
    facts = experiment.model_dump(mode="json")
    facts["data"]["paths"] = [_drop_absolute_folder(path) for path in experiment.data.paths]
    init_from = experiment.training.init_from
    if isinstance(init_from, str):
        facts["training"]["init_from"] = _drop_absolute_folder(init_from)
    return facts


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested data as dotted keys with their values."""
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def describe_kv(experiment: Experiment, dtype: str = MODEL_DTYPE) -> dict[str, Any]:
    """Return which layers cache K/V, and the bytes of it for one sequence.

    Args:
        dtype: of the weights that were measured.
    """
    layout = KVLayout.of(experiment.model, experiment.serving)
    block = experiment.model.block_size
    return {
        "owners": list(layout.owners),
        "kinds": experiment.model.layer_kinds,
        "bytes_per_token": layout.bytes_per_token(dtype),
        "bytes_at_block_size": layout.stored_bytes(1, block, dtype),
    }


def _drop_absolute_folder(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path
