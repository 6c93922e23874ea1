"""Names of metrics in MLflow: the record's names in groups, without duplicates.

MLflow makes a section of charts for every group, the part of a name before ``/``:

- ``quality/``: losses, accuracies and probes. ``_served`` marks scores through the serving cache.
- ``kv/``: bytes of the cache, and memory while decoding.
- ``speed/``: times of decoding.
- ``reuse/``: what a prefix cache reuses between the turns of conversations.
- ``train/``: curves, size and throughput of the training.
- ``sweep/``: of a sweep's own run.

What the record holds of each eighth of the context is a curve here, with the eighth as its step,
and so is what it holds of each turn.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvlab.store.metrics import collect_metrics

RENAMED = {
    "kv_bytes_storage": "kv/bytes",
    "kv_bytes_read": "kv/bytes_read_per_token",
    "training_tokens_per_second": "train/tokens_per_second",
    "training_flops_per_second": "train/flops_per_second",
    "training_mfu": "train/mfu",
    "training_peak_bytes": "train/peak_bytes",
    "train_loss": "train/loss",
    "validation_loss": "train/validation_loss",
}
"""Metrics and curves of the record whose names are shorter in MLflow."""

DUPLICATES = {
    "kv_bytes_formula": "kv_bytes_storage",
    "loss_paired": "loss",
    "bits_per_byte_paired": "bits_per_byte",
}
"""Metric of the record -> the one that makes it superfluous where both have the same value."""

_GROUPS = {
    "kv": ("peak_bytes_",),
    "speed": ("ttft_", "tpot_", "tokens_per_second", "cache_speedup"),
    "reuse": ("reuse_",),
}
"""Group -> beginnings of names; all other names are in ``quality``."""

_PART = re.compile(r"(?P<name>\w+?)_part(?P<part>[1-8])(?P<served>_served)?")
_TURN = re.compile(r"reuse_(?P<name>\w+)_turn(?P<turn>[0-9]+)")

SIZES = {
    "kv/bytes": ("kv", "bytes_at_block_size"),
    "kv/bytes_per_token": ("kv", "bytes_per_token"),
    "train/parameters": ("model", "parameters"),
    "train/flops": ("model", "training_flops"),
}
"""Metric in MLflow -> where `result.json` has it, of a trial that failed, too."""


def tracked_name(name: str) -> tuple[str, int | None]:
    """Return a metric's name in MLflow, and its step if it is a point of a curve.

    Args:
        name: a metric or curve of the record.
    """
    if match := _PART.fullmatch(name):
        served = match["served"] or ""
        return f"quality/{match['name']}_by_context{served}", int(match["part"])
    if match := _TURN.fullmatch(name):
        return f"reuse/{match['name']}_by_turn", int(match["turn"])
    if name in RENAMED:
        return RENAMED[name], None
    for group, beginnings in _GROUPS.items():
        if name.startswith(beginnings):
            return f"{group}/{name.removeprefix('reuse_')}", None
    return f"quality/{name}", None


def tracked_metrics(result: Mapping[str, Any]) -> Iterator[tuple[str, float, int | None]]:
    """Iterate over a result's metrics as MLflow gets them: name, value and step, if it has one.

    Duplicates and values that are not finite are left out: MLflow's page would draw NaN as 0.

    Args:
        result: contents of `result.json`.
    """
    metrics = collect_metrics(result)
    values: dict[tuple[str, int | None], Any] = {
        (name, None): result[section][key] for name, (section, key) in SIZES.items()
    }
    for name, value in metrics.items():
        if name not in DUPLICATES or value != metrics.get(DUPLICATES[name]):
            values[tracked_name(name)] = value
    for (name, step), value in sorted(
        values.items(), key=lambda item: (item[0][0], item[0][1] or 0)
    ):
        if math.isfinite(value):
            yield name, float(value), step
