"""`result.json`: the document that reports and MLflow are made from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from kvlab.errors import MeasurementError
from kvlab.layout import KVLayout, parameter_count, training_flops
from kvlab.spec.dtypes import MODEL_DTYPE
from kvlab.spec.experiment import Experiment
from kvlab.store.failure import Failure
from kvlab.store.metrics import METRICS
from kvlab.store.provenance import DataProvenance, Machine


class RecordedTrial(Protocol):
    """What the record keeps of a trial. `kvlab.trial.Trial` is one."""

    @property
    def id(self) -> str: ...

    @property
    def training_id(self) -> str: ...

    @property
    def experiment(self) -> Experiment: ...

    @property
    def seed(self) -> int: ...

    @property
    def data_identity(self) -> str: ...


@dataclass(frozen=True)
class TrialMeasurements:
    """What the stages of a trial found.

    Attributes:
        measurements: numbers by the names of `kvlab.store.metrics`.
        curves: ``train_loss`` and ``validation_loss``, each ``[[step, tokens, loss], ...]``.
        training_record: steps, tokens, seconds and so on of the training; ``start`` says
            where its first weights came from, and what became of each.
        items: HellaSwag, item by item.
        benchmark: every line that the benchmark measured, see `kvlab.benchmark.measurement`.
    """

    measurements: dict[str, float | int]
    curves: dict[str, list[list[float]]]
    training_record: dict[str, Any]
    machine: Machine
    data: DataProvenance
    items: list[dict[str, Any]] = field(default_factory=list)
    benchmark: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, value in self.measurements.items():
            if name not in METRICS:
                raise MeasurementError(f"{name} is measured but stands in no table of metrics")
            if not math.isfinite(value):
                raise MeasurementError(f"{name} = {value} is not a number that can be compared")


def build_result(
    trial: RecordedTrial,
    status: Literal["done", "failed", "diverged", "pruned"],
    provenance: dict[str, Any],
    *,
    measured: TrialMeasurements | None = None,
    failure: Failure | None = None,
    pruned: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A complete result: measured, failed with an error, or pruned where a search left it."""
    assert (measured is None) == (status != "done"), "exactly the done trials are measured"
    return {
        "trial": trial.id,
        "training": trial.training_id,
        "status": status,
        "seed": trial.seed,
        "experiment": experiment_facts(trial.experiment),
        "kv": kv_facts(trial.experiment),
        "model": {
            "parameters": parameter_count(trial.experiment.model),
            "training_flops": training_flops(trial.experiment),
        },
        "measurements": measured.measurements if measured else {},
        "curves": measured.curves if measured else {"train_loss": [], "validation_loss": []},
        "benchmark": measured.benchmark if measured else [],
        "training_record": measured.training_record if measured else None,
        "error": failure.as_dict() if failure else None,
        **({"pruned": dict(pruned)} if pruned else {}),
        "provenance": provenance,
    }


def trial_facts(trial: RecordedTrial) -> dict[str, Any]:
    """What names a trial, known before it runs: its ``trial.json``."""
    return {
        "trial": trial.id,
        "training": trial.training_id,
        "seed": trial.seed,
        "data_identity": trial.data_identity,
        "experiment": experiment_facts(trial.experiment),
    }


def experiment_facts(experiment: Experiment) -> dict[str, Any]:
    """The configuration as plain data; of absolute paths only the last name, see provenance."""
    facts = experiment.model_dump(mode="json")
    facts["data"]["paths"] = [_drop_absolute_folder(path) for path in experiment.data.paths]
    start = experiment.training.init_from
    facts["training"]["init_from"] = (
        _drop_absolute_folder(start) if isinstance(start, str) else start
    )
    return facts


def _drop_absolute_folder(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path


def kv_facts(experiment: Experiment) -> dict[str, Any]:
    """Who caches what, and the bytes of it for one sequence."""
    layout = KVLayout.of(experiment.model, experiment.serving)
    block = experiment.model.block_size
    return {
        "owners": list(layout.owners),
        "kinds": layout.kinds,
        "bytes_per_token": layout.bytes_per_token(MODEL_DTYPE),
        "bytes_at_block_size": layout.stored_bytes(1, block, MODEL_DTYPE),
    }
