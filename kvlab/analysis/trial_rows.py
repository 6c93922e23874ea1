"""Read the record of one sweep as rows: one per cell and seed, whatever the trial's status.

Whether their times compare depends on what else ran and on the order in which they were taken.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab.errors import RecordDamaged
from kvlab.humanize import format_count
from kvlab.store import Store
from kvlab.store.metrics import METRICS, collect_metrics

Levels = tuple[str, ...]
"""Level names of one cell, in the order of the sweep's factors."""


@dataclass(frozen=True)
class TrialRow:
    """One cell at one seed.

    Attributes:
        status: ``done``, ``failed``, ``diverged``, ``pruned``, ``damaged`` or ``missing``.
        training: Id of the training, empty if there is no result.
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

    @property
    def code(self) -> tuple[str, str] | None:
        """Digests of the code that trained and of the code that measured; see
        `kvlab.trial.code_identity`. None if the record does not say, or nothing was trained."""
        code = (self.record.get("provenance") or {}).get("code") or {}
        digests = [*code.get("training", ()), code.get("measurement", "")]
        return (" + ".join(digests[:-1]), digests[-1]) if digests[1:] and all(digests) else None


_NOT_KEPT = ("measurements", "curves", "files")
"""Parts of a result that have fields of their own, or lie in files of their own."""


def read_rows(store: Store, sweep: Mapping[str, Any]) -> list[TrialRow]:
    """Read all rows of a sweep.

    Returns:
        Rows sorted by the order of the levels, then by seed.
    """
    places = [{level: n for n, level in enumerate(names)} for names in sweep["factors"].values()]
    timings = store.timings(sweep["name"])
    results: dict[str, tuple[str, dict[str, Any]]] = {"": ("missing", {})}
    rows = []
    for cell in sweep["cells"]:
        levels = tuple(cell["levels"][factor] for factor in sweep["factors"])
        # while its settings are found, a cell has no trials yet
        trials = cell["trials"] or dict.fromkeys(map(str, sweep["seeds"]), "")
        for seed, trial in trials.items():
            if trial not in results:  # several cells may share a trial
                try:
                    found = store.result(trial, timings)
                    state = "missing" if found is None else str(found["status"])
                    results[trial] = state, found or {}
                except RecordDamaged:
                    results[trial] = "damaged", {}
            status, result = results[trial]
            curves = result.get("curves") if status == "done" else None
            curve = (curves or {}).get("validation_loss") or ()
            rows.append(
                TrialRow(
                    levels,
                    int(seed),
                    trial,
                    status,
                    str(result.get("training") or ""),
                    collect_metrics(result),
                    tuple((step, tokens, loss) for step, tokens, loss in curve),
                    {k: v for k, v in result.items() if k not in _NOT_KEPT and v is not None},
                )
            )

    def sort_key(row: TrialRow) -> tuple[list[int], int]:
        return [n[level] for n, level in zip(places, row.levels, strict=True)], row.seed

    return sorted(rows, key=sort_key)


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


# Times that compare


_TIME_UNITS = ("ms", "tokens/s", "times")


def is_time(metric: str) -> bool:
    """Return whether a metric depends on what else a machine did."""
    return METRICS[metric].unit in _TIME_UNITS


def is_training_rate(metric: str) -> bool:
    """Return whether a metric is a time of the training, which is not taken again."""
    return is_time(metric) and metric.startswith("training_")


def is_timed_again(row: TrialRow) -> bool:
    """Return whether a trial was timed again, with nothing else on the machine."""
    return "timing" in row.record


def is_shared(row: TrialRow) -> bool:
    """Return whether something else used the device, or its cores, while a trial was timed."""
    provenance = row.record["provenance"]
    return not is_timed_again(row) and bool(provenance.get("timings") == "shared")


def describe_shared_timings(rows: Iterable[TrialRow]) -> str:
    """Say how many trials were timed while something else ran; empty if none were.

    Such times say less about their cell. Results that do not record it count as none.
    """
    shared = [is_shared(row) for row in rows]
    count = sum(shared)
    if not count:
        return ""
    which = "All trials" if count == len(shared) else f"{count} of {len(shared)} trials"
    return f"{which} were timed while something else used their device or its machine's cores"


def describe_timing_obstacle(
    cells: Mapping[Levels, Mapping[int, TrialRow]], baseline: Levels
) -> str:
    """Say why the times of different cells do not compare; empty if they do.

    They compare if every trial was timed alone, those of one seed on one kind of device, and the
    trials of a cell and of the baseline alternate: a machine that slows down in the course of a
    sweep would be taken for a cell's doing. Trials that were timed again in one session alternate
    from round to round.
    """
    rows = [row for by_seed in cells.values() for row in by_seed.values() if row.is_done]
    if shared := describe_shared_timings(rows):
        return shared
    firsts = [row for row in rows if not is_timed_again(row)]
    if any(row.record["provenance"].get("timings") is None for row in firsts):
        return "The record does not say whether the trials were timed alone"
    ends: dict[Levels, list[str]] = {}  # when trials were timed: at their end, or that of a session
    devices = defaultdict[int, set[str]](set)
    for row in rows:
        timed = row.record.get("timing", row.record["provenance"])
        ends.setdefault(row.levels, []).append(str(timed.get("finished", "")))
        devices[row.seed].add(str(timed.get("device")))
    mixed = max(devices.values(), key=len, default=set())
    if len(mixed) > 1:
        return f"Trials of one seed were timed on different devices ({' and '.join(sorted(mixed))})"
    own = ends.get(baseline, ["", "~"])
    apart = [one for one in ends.values() if min(one) > max(own) or max(one) < min(own)]
    if apart:
        return (
            f"The trials of {format_count(len(apart), 'cell')} were timed before or after all of"
            " the baseline's, not in between"
        )
    return ""
