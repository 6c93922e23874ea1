"""Memory: KV bytes by formula and by storage, and peak memory."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import TrialRow
from kvlab.humanize import format_count
from kvlab.report.document import (
    EMPTY_CELL,
    Cell,
    Column,
    Content,
    Row,
    Section,
    Span,
    Strong,
    Table,
    cell,
    paragraph,
)
from kvlab.report.formatting import format_exact_bytes, format_mebibytes, format_megabytes
from kvlab.report.table_columns import range_column

_PEAKS = ("peak_bytes_cached", "peak_bytes_uncached", "peak_bytes_activations")


def report_memory(study: Study) -> Section | None:
    """Compare the formula with the cache's storages, and list peaks."""
    measured = [row for row in study.done_rows if "kv_bytes_storage" in row.measurements]
    if not measured:
        return None
    mismatches = [row for row in measured if not _agrees(row)]
    spans: list[Span] = [
        "KV bytes of one sequence at block size, by the layout's formula and by adding up the"
        " cache's unique storages. ",
    ]
    if mismatches:
        count = f"{len(mismatches)} of {format_count(len(measured), 'trial')} disagree"
        spans += [Strong(f"{count}: a bug, not a result."), " They are marked below."]
    else:
        spans.append(f"They agree to the byte in all {format_count(len(measured), 'trial')}. ")
    spans.append(
        " A layer that shares its K/V still reads them, so bytes read per token shrink with heads"
        " and windows, not with sharing. Peaks contain weights, logits and the allocator's"
        " rounding; they bound batch sizes, they do not measure the cache."
    )
    columns = (
        Column("cell"),
        Column("formula (bytes)", True),
        range_column("storages (bytes)", ends=("least", "most")),
        Column("agree"),
        Column("MB", True, "10^6 bytes, by the formula"),
        Column("MiB", True, "2^20 bytes, by the formula"),
        Column("read per token (bytes)", True),
        Column("peak with cache (MiB)", True, "largest over seeds"),
        Column("peak without (MiB)", True, "largest over seeds"),
        Column("activations (MiB)", True, "of the peak with cache, beside weights, cache, logits"),
    )
    rows = tuple(_row(study, list(by_seed.values())) for by_seed in study.cells.values())
    table = Table("memory", "Theory against measured memory.", columns, tuple(filter(None, rows)))
    contents: list[Content] = [paragraph(*spans)]
    base = study.kv_bytes(study.baseline)
    if base is not None:
        contents.append(paragraph(f"The baseline stores {format_exact_bytes(base)}."))
    is_appendix = not study.is_untrained and not mismatches
    return Section("Memory", (*contents, table), is_appendix)


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
            cell(f"{formula:,}", formula),
            Cell(stored_text, stored[0], csv=(stored[0], stored[-1])),
            cell("yes" if agree else "no", tone="" if agree else "bad"),
            cell(format_megabytes(formula), formula / 10**6),
            cell(format_mebibytes(formula), formula / 2**20),
            _largest_cell(measured, "kv_bytes_read", whole=True),
            *(_largest_cell(measured, peak) for peak in _PEAKS),
        ),
        study.cell_key(levels),
    )


def _largest_cell(rows: list[TrialRow], metric: str, whole: bool = False) -> Cell:
    values = [row.measurements[metric] for row in rows if metric in row.measurements]
    if not values:
        return EMPTY_CELL
    value = max(values)
    return cell(f"{value:,.0f}", value) if whole else cell(format_mebibytes(value), value / 2**20)
