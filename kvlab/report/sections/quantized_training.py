"""Training in int8 and with rounded K/V: loss, speed and memory against the same in float."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels, TrialRow
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Fold,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import (
    PLUS_MINUS,
    TIMES,
    format_difference,
    format_ratio,
    format_significant,
    short_title,
)
from kvlab.report.table_columns import (
    csv_only,
    mean_and_spread,
    mean_cell,
    mean_column,
    title_with_unit,
)
from kvlab.store.metrics import METRICS

_FLOAT: dict[str, Any] = {
    "int8": [],
    "kv_dtype": "model",
    "kv_group": None,
    "kv_residual": None,
}
"""Settings of a training without any quantization."""

_COSTS = {"training_tokens_per_second": "speed", "training_peak_bytes": "peak memory"}

Pairs = Mapping[Levels, Mapping[int, tuple[TrialRow, TrialRow]]]
"""Cell -> seed -> its trial, and that of the same recipe in float."""


def report_quantized_training(study: Study) -> Section | None:
    """Report what quantization in training changes, also where it is slower."""
    quantized = [row for row in study.done_rows if _quantized(row)]
    if not quantized:
        return None
    floats = {(_recipe(row), row.seed): row for row in study.done_rows if not _quantized(row)}
    pairs: dict[Levels, dict[int, tuple[TrialRow, TrialRow]]] = {}
    for row in quantized:
        other = floats.get((_recipe(row), row.seed))
        pairs.setdefault(row.levels, {}).update({row.seed: (row, other)} if other else {})
    contents: list[Content] = [paragraph(_INTRODUCTION), _table(study, pairs)]
    if padded := sorted({line for levels in pairs for line in _padded_lines(study, levels)}):
        title = f"{format_count(len(padded), 'product')} padded with zeros for the hardware"
        contents.append(Fold(title, tuple(paragraph(line) for line in padded)))
    return Section("Quantized training", tuple(contents))


_INTRODUCTION = (
    "Linear layers whose products are int8, and K/V that training rounds as a cache"
    " would, each against the same recipe without, paired by seed. Tokens per second and peak"
    " memory are those of the trainings themselves, beside whatever else the machine did; a ratio"
    " below 1 of tokens per second is a slower training. All weights are evaluated with products in"
    " float."
)


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


def _table(study: Study, pairs: Pairs) -> Table:
    metric = study.primary_metric
    columns = [
        Column("cell"),
        Column("int8 products"),
        Column("other products", hint="their precision"),
        Column("K/V"),
        Column("kernel", hint="that multiplied the codes"),
        mean_column(title_with_unit(metric, short_title(metric)), hint=METRICS[metric].title),
        mean_column("change", METRICS[metric].unit, "paired difference from float"),
    ]
    for name, title in _COSTS.items():
        unit = "MiB" if METRICS[name].unit == "bytes" else METRICS[name].unit
        columns.append(mean_column(f"{title} ({unit})", hint=METRICS[name].title))
        columns.append(Column(f"of float ({title})", True, "mean of the ratios at each seed"))
    columns.append(csv_only(Column("pairs", True)))
    rows = tuple(_row(study, levels, pairs.get(levels)) for levels in _order(study, pairs))
    caption = "Quantized trainings and the same in float; mean over seeds."
    return Table("quantized-training", caption, tuple(columns), rows)


def _order(study: Study, pairs: Pairs) -> list[Levels]:
    """Return the cells of the table: quantized ones, and the same in float at any precision."""
    found = [other for seeds in pairs.values() for _, other in seeds.values()]
    recipes = {_recipe(other, "precision") for other in found}
    others = {row.levels for row in study.done_rows if _recipe(row, "precision") in recipes}
    return [levels for levels in study.cells if levels in pairs or levels in others]


def _row(
    study: Study, levels: Levels, found: Mapping[int, tuple[TrialRow, TrialRow]] | None
) -> Row:
    pairs = list((found or {}).values())
    entries = [
        cell(study.label(levels)),
        *_describe(study, levels),
        mean_cell(study, levels, study.primary_metric),
        _change_cell(study.primary_metric, pairs),
    ]
    for name in _COSTS:
        entries += [_cost_cell(study, levels, name), _ratio_cell(name, pairs)]
    entries.append(cell(str(len(pairs)), len(pairs)) if found is not None else EMPTY_CELL)
    return Row(tuple(entries), study.cell_key(levels), "" if found is not None else "muted")


def _describe(study: Study, levels: Levels) -> Iterator[Cell]:
    """Yield what is quantized, and by which kernel, as the trainings' records say."""
    row = next(row for row in study.cells[levels].values() if row.is_done)
    quantized = _quantized(row)
    record = (row.record.get("training_record") or {}).get("int8") or {}
    yield cell(", ".join(quantized.get("int8", ())) or "none")
    yield cell(str(_training(row).get("precision", "float32")))
    yield cell(str(quantized.get("kv_dtype", "model")))
    yield cell(str(record["kernel"])) if record.get("products") else EMPTY_CELL


def _cost_cell(study: Study, levels: Levels, metric: str) -> Cell:
    """Return a mean and its spread, of bytes in MiB."""
    if METRICS[metric].unit != "bytes":
        return mean_cell(study, levels, metric)
    values = [value / 2**20 for value in study.values(levels, metric).values()]
    if not values:
        return EMPTY_CELL
    mean, spread = mean_and_spread(values)
    text = format_significant(mean)
    if spread is not None:
        text += f" {PLUS_MINUS} {format_significant(spread)}"
    return Cell(text, mean, csv=(mean, spread))


def _values(metric: str, pairs: Sequence[tuple[TrialRow, TrialRow]]) -> list[tuple[float, float]]:
    return [
        (own.measurements[metric], other.measurements[metric])
        for own, other in pairs
        if metric in own.measurements and metric in other.measurements
    ]


def _change_cell(metric: str, pairs: Sequence[tuple[TrialRow, TrialRow]]) -> Cell:
    changes = [own - other for own, other in _values(metric, pairs)]
    if not changes:
        return EMPTY_CELL
    mean, spread = mean_and_spread(changes)
    text = format_difference(metric, mean)
    if spread is not None:
        text += f" {PLUS_MINUS} {format_difference(metric, spread).lstrip('+')}"
    return Cell(text, mean, csv=(mean, spread))


def _ratio_cell(metric: str, pairs: Sequence[tuple[TrialRow, TrialRow]]) -> Cell:
    ratios = [own / other for own, other in _values(metric, pairs) if other]
    if not ratios:
        return EMPTY_CELL
    mean, _ = mean_and_spread(ratios)
    return cell(format_ratio(mean), mean)


def _padded_lines(study: Study, levels: Levels) -> Iterator[str]:
    for row in study.cells[levels].values():
        record = (row.record.get("training_record") or {}).get("int8") or {} if row.is_done else {}
        for product, layer, own, multiplied in record.get("padded", ()):
            sizes = (f" {TIMES} ".join(map(str, size)) for size in (own, multiplied))
            yield f"{product} of {layer}: " + " as ".join(sizes)
