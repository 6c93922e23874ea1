"""The report's section of a mix: the loss of each source, one-shot and served."""

import re

from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols

_TOKENS = re.compile(r"loss_(?P<source>[a-z0-9_]+?)(?P<served>_served)?_tokens")


def report_mix(study: Study) -> doc.Section | None:
    """Report the losses of the sources that the trials were trained on together."""
    found = [match for name in study.measured_metrics if (match := _TOKENS.fullmatch(name))]
    if not found:
        return None
    found.sort(key=lambda match: (match["source"], match["served"] or ""))
    rows: list[doc.KeyedRow] = []
    measured = found[0][0].removesuffix("_tokens")
    for levels in (own for own in study.cells if study.values(own, measured)):
        entries: list[tuple[doc.Column, doc.Value]] = []
        for match in found:
            metric = match[0].removesuffix("_tokens")
            counts = {row.measurements.get(match[0], 0) for row in study.done_rows} - {0}
            hint = " or ".join(f"{int(count):,}" for count in sorted(counts)) + " targets a trial"
            how = "served" if match["served"] else "one-shot"
            head = f"{match['source'].replace('_', '-')}, {how}"
            column = cols.mean_column(head, fmt.display_unit(metric), hint)
            entries.append((column, cols.mean_cell(study, levels, metric)))
        named: doc.Entries = (("cell", study.label(levels)), *entries)
        rows.append((named, study.cell_key(levels)))
    note = (
        "Each model was trained on these sources together. The validation loss is the mean over the"
        " targets of all of them; here it is divided."
    )
    words = f"Loss of each source, mean over {format_count(len(study.seeds), 'seed')}."
    if len(study.seeds) > 1:
        words += f" {fmt.PLUS_MINUS} is the standard deviation."
    table = doc.make_table("mix", words, rows)
    return doc.Section("Sources of the mix", (doc.Paragraph((note,)), table))
