"""The record of one sweep as tidy rows: one for every cell and seed, whatever became of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import StoreError
from kvlab.store import Store
from kvlab.store.metrics import collect_metrics

Levels = tuple[str, ...]
"""Level names in the order of the sweep's factors."""


@dataclass(frozen=True)
class TrialRow:
    """One cell at one seed.

    Attributes:
        status: done, failed, diverged, pruned, damaged, or missing.
        curve: ``(step, tokens, loss)`` of the validation losses during training, if it is done.
        facts: the other parts of the result as recorded; empty if there is none.
    """

    levels: Levels
    seed: int
    trial: str
    status: str
    training: str = ""
    measurements: Mapping[str, float] = field(default_factory=dict)
    curve: tuple[tuple[float, float, float], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.status == "done"


_RECORDED_FACTS = (
    "experiment",
    "kv",
    "model",
    "error",
    "provenance",
    "training_record",
    "benchmark",
    "pruned",
)


def read_rows(store: Store, sweep: Mapping[str, Any]) -> list[TrialRow]:
    """Every row of a sweep, by level order and seed, whatever order the record lists them in."""
    order = {
        factor: {level: index for index, level in enumerate(levels)}
        for factor, levels in sweep["factors"].items()
    }

    def place(row: TrialRow) -> tuple[tuple[int, ...], int]:
        levels = zip(order.values(), row.levels, strict=True)
        return tuple(names[level] for names, level in levels), row.seed

    return sorted(_iter_rows(store, sweep), key=place)


def _iter_rows(store: Store, sweep: Mapping[str, Any]) -> Iterator[TrialRow]:
    read: dict[str, tuple[str, dict[str, Any]]] = {}  # a trial may answer several cells
    for cell in sweep["cells"]:
        levels = tuple(cell["levels"][factor] for factor in sweep["factors"])
        for seed, trial in cell["trials"].items():
            if trial not in read:
                read[trial] = _read_result(store, trial)
            status, result = read[trial]
            yield _make_row(levels, int(seed), trial, status, result)


def _read_result(store: Store, trial: str) -> tuple[str, dict[str, Any]]:
    try:
        result = store.result(trial)
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
        {key: result[key] for key in _RECORDED_FACTS if result.get(key) is not None},
    )


def flatten_row(row: TrialRow, factors: tuple[str, ...]) -> dict[str, Any]:
    """One flat JSON object: levels, ids, exact KV bytes, every measurement, the error if any."""
    facts = row.facts
    flat: dict[str, Any] = {
        **{f"factor.{name}": level for name, level in zip(factors, row.levels, strict=True)},
        "seed": row.seed,
        "trial": row.trial,
        "training": row.training or None,
        "status": row.status,
    }
    for part in ("kv", "model"):
        for key, value in facts.get(part, {}).items():
            flat[f"{part}.{key}"] = value
    flat |= {f"measured.{name}": row.measurements[name] for name in sorted(row.measurements)}
    error = facts.get("error") or {}
    flat |= {f"pruned.{key}": value for key, value in facts.get("pruned", {}).items()}
    flat |= {f"error.{key}": error[key] for key in ("class", "type", "message") if key in error}
    return flat
