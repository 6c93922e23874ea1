"""The section of metrics that users' files define."""

from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.store.metrics import METRICS


def report_own_metrics(study: Study) -> doc.Section | None:
    """Report the mean of each metric in each cell, one-shot and served."""
    names = [name for name in study.measured_metrics if METRICS.is_offered(name)]
    if not names:
        return None
    rows: list[doc.KeyedRow] = []
    for levels in study.cells:
        entries: list[tuple[doc.Column | str, doc.Value]] = [("cell", study.label(levels))]
        for name in names:
            unit = fmt.display_unit(name)
            title = METRICS[name].title + (f" ({unit})" if unit else "")
            column = cols.mean_column(title, unit, f"`{name}`")
            entries.append((column, cols.mean_cell(study, levels, name)))
        rows.append((entries, study.cell_key(levels)))
    caption = f"Means over {format_count(len(study.seeds), 'seed')}"
    if len(study.seeds) > 1:
        caption += f" {fmt.PLUS_MINUS} standard deviation"
    note = (
        "Files of the experiment define these, and the record has their text. The mean is over the"
    )
    note += " tokens that are scored served, or without serving over those of the loss."
    table = doc.make_table("own-metrics", f"{caption}.", rows)
    return doc.Section("Metrics of extensions", (doc.Paragraph((note,)), table))
