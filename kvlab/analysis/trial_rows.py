"""Read the record of one sweep as rows: one per cell and seed, whatever the trial's status."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import StoreError
from kvlab.store import Store
from kvlab.store.metrics import collect_metrics
from kvlab.store.timings import TimingSession

Levels = tuple[str, ...]
"""Level names of one cell, in the order of the sweep's factors."""


@dataclass(frozen=True)
class TrialRow:
    """One cell at one seed.

    Attributes:
        levels: The cell.
        seed: The seed.
        trial: The trial's id.
        status: ``done``, ``failed``, ``diverged``, ``pruned``, ``damaged`` or ``missing``.
        training: Id of the training, empty if there is no result.
        measurements: Metrics by name.
        curve: ``(step, tokens, loss)`` of each validation during training, if the trial is done.
        record: The other parts of the result as recorded; empty if there is no result.
    """

    levels: Levels
    seed: int
    trial: str
    status: str
    training: str = ""
    measurements: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float, float], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        return self.status == "done"


_RECORD_KEYS = (
    "experiment",
    "kv",
    "model",
    "error",
    "provenance",
    "training_record",
    "benchmark",
    "timing",
    "needle",
    "pruned",
)


def read_rows(store: Store, sweep: Mapping[str, Any]) -> list[TrialRow]:
    """Read all rows of a sweep.

    Args:
        store: The store that holds the record.
        sweep: The sweep's description, as ``sweep.json`` holds it.

    Returns:
        Rows sorted by the order of the levels, then by seed.
    """
    level_indices = [
        {level: index for index, level in enumerate(levels)} for levels in sweep["factors"].values()
    ]

    def sort_key(row: TrialRow) -> tuple[tuple[int, ...], int]:
        levels = zip(level_indices, row.levels, strict=True)
        return tuple(indices[level] for indices, level in levels), row.seed

    return sorted(_iter_rows(store, sweep), key=sort_key)


def _iter_rows(store: Store, sweep: Mapping[str, Any]) -> Iterator[TrialRow]:
    results: dict[str, tuple[str, dict[str, Any]]] = {}  # several cells may share a trial
    timings = store.timings(sweep["name"])
    for cell in sweep["cells"]:
        levels = tuple(cell["levels"][factor] for factor in sweep["factors"])
        # while its settings are tuned, a cell has no trials yet
        trials = cell["trials"] or dict.fromkeys(map(str, sweep["seeds"]), "")
        for seed, trial in trials.items():
            if not trial:
                results[trial] = "missing", {}
            if trial not in results:
                results[trial] = _read_result(store, trial, timings)
            status, result = results[trial]
            yield _make_row(levels, int(seed), trial, status, result)


def _read_result(
    store: Store, trial: str, timings: Mapping[str, TimingSession]
) -> tuple[str, dict[str, Any]]:
    try:
        result = store.result(trial, timings)
        if result is not None:
            store.check_details(trial, result)
    except StoreError:
        return "damaged", {}
    return ("missing", {}) if result is None else (str(result["status"]), result)


def _make_row(
    levels: Levels, seed: int, trial: str, status: str, result: Mapping[str, Any]
) -> TrialRow:
    curves = (result.get("curves") or {}) if status == "done" else {}
    curve = curves.get("validation_loss") or []
    return TrialRow(
        levels,
        seed,
        trial,
        status,
        str(result.get("training") or ""),
        collect_metrics(result),
        tuple((step, tokens, loss) for step, tokens, loss in curve),
        {key: result[key] for key in _RECORD_KEYS if result.get(key) is not None},
    )


def flatten_row(row: TrialRow, factors: tuple[str, ...]) -> dict[str, Any]:
    """Return a row as a flat JSON object.

    It holds the levels, ids, exact KV bytes, every measurement, and the error if there is one.
    """
    record = row.record
    flat: dict[str, Any] = {
        **{f"factor.{name}": level for name, level in zip(factors, row.levels, strict=True)},
        "seed": row.seed,
        "trial": row.trial,
        "training": row.training or None,
        "status": row.status,
    }
    for part in ("kv", "model"):
        for key, value in record.get(part, {}).items():
            flat[f"{part}.{key}"] = value
    flat |= {f"measured.{name}": row.measurements[name] for name in sorted(row.measurements)}
    error = record.get("error") or {}
    if "timing" in record:
        flat["timed_again"] = record["timing"]["finished"]
    flat |= {f"pruned.{key}": value for key, value in record.get("pruned", {}).items()}
    flat |= {f"error.{key}": error[key] for key in ("class", "type", "message") if key in error}
    return flat
