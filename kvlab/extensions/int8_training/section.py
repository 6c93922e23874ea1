"""Training with rounded K/V or products: loss, speed and memory against the same in float."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report import texts
from kvlab.store.metrics import METRICS

_FLOAT: dict[str, Any] = {"int8": [], "kv_dtype": "model", "kv_group": None, "kv_residual": None}
"""Settings of a training without any quantization."""

_COSTS = {"training_tokens_per_second": "speed", "training_peak_bytes": "peak memory"}

Pair = tuple[TrialRow, TrialRow]
"""A trial, and that of the same recipe and seed in float."""


def report_quantized_training(study: Study) -> doc.Section | None:
    """Report what quantization in training changes, also where it is slower."""
    quantized = [row for row in study.done_rows if _quantized(row)]
    if not quantized:
        return None
    floats = {(_recipe(row), row.seed): row for row in study.done_rows if not _quantized(row)}
    pairs: dict[Levels, list[Pair]] = {}
    for row in quantized:
        found = pairs.setdefault(row.levels, [])
        if (other := floats.get((_recipe(row), row.seed))) is not None:
            found.append((row, other))
    # the same in float at any precision stand beside
    recipes = {_recipe(other, "precision") for found in pairs.values() for _, other in found}
    beside = {row.levels for row in study.done_rows if _recipe(row, "precision") in recipes}
    rows = (
        (_entries(study, levels, pairs.get(levels)), study.cell_key(levels), levels not in pairs)
        for levels in study.cells
        if levels in pairs or levels in beside
    )
    caption = "Quantized trainings and the same in float; mean over seeds."
    table = doc.make_table("quantized-training", caption, rows)
    return doc.Section("Quantized training", (texts.write("quantized training"), table))


def _training(row: TrialRow) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row.record.get("experiment", {}).get("training", {})
    return found


def _quantized(row: TrialRow) -> dict[str, Any]:
    """Return the settings by which a trial's training is quantized."""
    training = _training(row)
    return {key: training[key] for key in _FLOAT if training.get(key, _FLOAT[key]) != _FLOAT[key]}


def _recipe(row: TrialRow, *without: str) -> str:
    """Return all that a trial does but the quantization of its training.

    Args:
        without: More settings of the training that are left out.
    """
    left_out = {*_FLOAT, *without}
    experiment = dict(row.record.get("experiment", {}))
    experiment["training"] = {k: v for k, v in _training(row).items() if k not in left_out}
    return json.dumps(experiment, sort_keys=True)


def _entries(study: Study, levels: Levels, pairs: Sequence[Pair] | None) -> doc.Entries:
    metric = study.primary_metric
    row = next(row for row in study.cells[levels].values() if row.is_done)
    quantized, record = _quantized(row), row.record.get("training_record") or {}
    yield "cell", study.label(levels)
    yield "int8 products", doc.cell(", ".join(quantized.get("int8", ())) or "none")
    yield "other products", str(_training(row).get("precision", "float32")), "their precision"
    stored = quantized.get("kv_dtype", "model")  # of a member with options: {name: options}
    yield "K/V", stored if isinstance(stored, str) else ", ".join(stored)
    int8 = record.get("int8")
    kernel = doc.cell(str(int8["kernel"])) if int8 else doc.EMPTY_CELL
    yield "kernel", kernel, "that multiplied the codes"
    column = cols.mean_column(cols.metric_title(metric), hint=METRICS[metric].title)
    yield column, cols.mean_cell(study, levels, metric)
    changes = [own - other for own, other in _values(metric, pairs)]
    change = cols.spread_cell(metric, changes, fmt.format_difference, fmt.format_magnitude)
    hint = "paired difference from float"
    yield cols.mean_column("change", fmt.difference_unit(metric), hint), change
    for name, title in _COSTS.items():
        unit, cell = METRICS[name].unit, cols.mean_cell(study, levels, name)
        if unit == "bytes":
            unit, sizes = "MiB", study.values(levels, name).values()
            cell = cols.spread_cell("", [size / 2**20 for size in sizes])
        yield cols.mean_column(f"{title} ({unit})", hint=METRICS[name].title), cell
        ratios = [own / other for own, other in _values(name, pairs) if other]
        mean = cols.mean_and_spread(ratios)[0] if ratios else None
        hint = "mean of the ratios at each seed"
        yield f"of float ({title})", cols.number_cell(mean, fmt.format_ratio), hint
    count: doc.Value = doc.EMPTY_CELL if pairs is None else len(pairs)
    yield cols.csv_only(doc.Column("pairs", True)), count


def _values(metric: str, pairs: Sequence[Pair] | None) -> list[tuple[float, float]]:
    return [
        (own.measurements[metric], other.measurements[metric])
        for own, other in pairs or ()
        if metric in own.measurements and metric in other.measurements
    ]
