"""Memory: KV bytes by formula and by storage, and peak memory."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.table_columns import csv_only, range_column, size_cell, size_column

_PEAKS = ("peak_bytes_cached", "peak_bytes_uncached", "peak_bytes_activations")


def report_memory(study: Study) -> Section | None:
    """Compare the formula with the cache's storages, and list peaks."""
    measured = [row for row in study.done_rows if "kv_bytes_storage" in row.measurements]
    if not measured:
        return None
    mismatches = [row for row in measured if not _agrees(row)]
    contents = (paragraph(*_describe_agreement(measured, mismatches)), _table(study, mismatches))
    is_appendix = not study.is_untrained and not mismatches
    return Section("Memory", contents, is_appendix)


def _describe_agreement(measured: list[TrialRow], mismatches: list[TrialRow]) -> list[Span]:
    spans: list[Span] = [
        "K/V bytes of one sequence at block size, by the layout's formula and by adding up the"
        " cache's storages. "
    ]
    if mismatches:
        count = f"{len(mismatches)} of {format_count(len(measured), 'trial')} disagree"
        spans += [Strong(f"{count}: a bug, not a result."), " They are marked below."]
    else:
        spans.append(f"They agree to the byte in all {format_count(len(measured), 'trial')}.")
    spans.append(
        " A layer that shares its K/V still reads them, so sharing does not reduce the bytes read"
        " per token. Peaks contain weights, activations and logits, too."
    )
    return spans


def _table(study: Study, mismatches: list[TrialRow]) -> Table:
    checks = (range_column("storages (bytes)", ends=("least", "most")), Column("agree"))
    columns = (
        Column("cell"),
        size_column("K/V cache", "by the formula"),
        *(checks if mismatches else map(csv_only, checks)),
        size_column("read per token"),
        size_column("peak with cache", "largest over seeds"),
        size_column("peak without", "largest over seeds"),
        size_column("activations", "of the peak with cache, beside weights, cache, logits"),
    )
    rows = tuple(_row(study, list(by_seed.values())) for by_seed in study.cells.values())
    return Table("memory", "Memory of every cell.", columns, tuple(filter(None, rows)))


def _agrees(row: TrialRow) -> bool:
    stored = row.measurements["kv_bytes_storage"]
    formula = row.measurements.get("kv_bytes_formula", stored)
    return bool(stored == formula == row.record["kv"]["bytes_at_block_size"])


def _row(study: Study, rows: list[TrialRow]) -> Row | None:
    measured = [row for row in rows if row.is_done and "kv_bytes_storage" in row.measurements]
    if not measured:
        return None
    levels = measured[0].levels
    formula = int(measured[0].record["kv"]["bytes_at_block_size"])
    stored = sorted({int(row.measurements["kv_bytes_storage"]) for row in measured})
    stored_text = ", ".join(f"{count:,}" for count in stored)
    agree = all(map(_agrees, measured))
    return Row(
        (
            cell(study.label(levels)),
            size_cell(formula),
            Cell(stored_text, stored[0], csv=(stored[0], stored[-1])),
            cell("yes" if agree else "no", tone="" if agree else "bad"),
            *(_largest_cell(measured, metric) for metric in ("kv_bytes_read", *_PEAKS)),
        ),
        study.cell_key(levels),
    )


def _largest_cell(rows: list[TrialRow], metric: str) -> Cell:
    values = [row.measurements[metric] for row in rows if metric in row.measurements]
    return size_cell(round(max(values))) if values else EMPTY_CELL
