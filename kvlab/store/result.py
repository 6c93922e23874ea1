"""The parts of `result.json`, which reports and MLflow runs are made from.

A `Failure` says why a trial has no measurements.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvlab import errors
from kvlab.layout import KVLayout
from kvlab.oom import classify_oom
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.spec.extension_files import locate_error
from kvlab.store.metrics import METRICS
from kvlab.store.provenance import DataProvenance, Machine, redact_paths

FailureClass = Literal[
    "bug", "diverged", "device_memory", "host_memory", "data", "resources", "source", "killed"
]
"""``device_memory`` and ``host_memory``: it ran out. ``source``: the weights that the training
starts from are unavailable or do not fit."""

_CLASSES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], FailureClass], ...] = (
    (errors.Diverged, "diverged"),
    (errors.DataError, "data"),
    (errors.ResourceError, "resources"),
    ((errors.SourceMissing, errors.PretrainedError), "source"),
)
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
        kind, message = classify_error(error), redact_paths(str(error))
        if kind == "bug" and (place := locate_error(error)):  # of a user's file
            message = f"{place}: {message}"
        return cls(kind, type(error).__name__, message, traceback)

    def as_dict(self) -> dict[str, str | None]:
        """Return the ``error`` of a result."""
        facts = {"type": self.type, "message": self.message, "traceback": self.traceback}
        return {"class": self.kind, **facts}


def classify_error(error: BaseException) -> FailureClass:
    """Return the class of an error that ended a trial; an unknown one is a bug."""
    for types, kind in _CLASSES:
        if isinstance(error, types):
            return kind
    memory: dict[str | None, FailureClass] = {"device": "device_memory", "host": "host_memory"}
    return memory.get(classify_oom(error), "bug")


@dataclass(frozen=True)
class TrialMeasurements:
    """What the stages of a trial measured.

    Attributes:
        measurements: numbers by the names of `METRICS`.
        curves: ``train_loss`` and ``validation_loss``, each ``[[step, tokens, loss], ...]``.
        training_record: steps, tokens, seconds and so on of the training; ``start`` says
            where its initial weights came from, and what became of each.
        items: HellaSwag results, one per item.
        details: objects by name, see `kvlab.store.Store.write_details`.
        benchmark: lines of the benchmark, see `kvlab.benchmark.measurement`.
        lines: further lines of numbers by their key in `result.json`.

    Raises:
        errors.MeasurementError: a measurement is not in `METRICS`, or is not finite.
    """

    measurements: dict[str, float | int]
    curves: dict[str, list[list[float]]]
    training_record: dict[str, Any]
    machine: Machine
    data: DataProvenance
    items: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)
    benchmark: list[dict[str, Any]] = field(default_factory=list)
    lines: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.measurements.items():
            if name not in METRICS:
                text = f"{name} is measured but not in the table of metrics"
                raise errors.MeasurementError(text)
            if not math.isfinite(value):
                text = f"{name} = {value} is not finite, so it cannot be compared"
                raise errors.MeasurementError(text)


def describe_experiment(experiment: Experiment) -> dict[str, Any]:
    """Return the configuration as plain data, with absolute paths cut to their last name."""
    facts = experiment.model_dump(mode="json")
    facts["data"]["paths"] = [_drop_absolute_folder(path) for path in experiment.data.paths]
    if experiment.data.has_checkpoint_tokenizer:
        name = _drop_absolute_folder(experiment.data.tokenizer)
        facts["data"]["tokenizer"] = name if "/" in name else f"./{name}"
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
