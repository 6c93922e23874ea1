"""The report's section of the largest batches."""

from kvlab.analysis.study import Study
from kvlab.analysis.trial_rows import Levels
from kvlab.report import document as doc
from kvlab.report import formatting as fmt
from kvlab.report import table_columns as cols
from kvlab.report.benchmark_plots import cell_lines


def report_limit(study: Study) -> doc.Section | None:
    """Report how many sequences of each cell fit, by trying and by the formula."""
    lines = {
        levels: {one["metric"]: one for one in cell_lines(study, levels) if one["part"] == "limit"}
        for levels in study.cells
    }
    base = lines.get(study.baseline, {}).get("largest_batch")

    def entries(levels: Levels) -> doc.Entries:
        tried = lines[levels].get("largest_batch")
        formula = lines[levels].get("largest_batch_formula")
        if tried is None or formula is None:
            return
        yield "tokens", tried["context_length"]
        yield "sequences", cols.number_cell(tried["value"], fmt.format_significant)
        ratio = tried["value"] / base["value"] if base and base["value"] else None
        yield "of the baseline's", cols.number_cell(ratio, fmt.format_ratio)
        yield "by formula", cols.number_cell(formula["value"], fmt.format_significant)

    notes = {own["largest_batch"]["note"] for own in lines.values() if "largest_batch" in own}
    caption = (
        f"Sequences of so many tokens that fit ({cols.join_names(sorted(notes))}); mean over seeds."
        " By formula: what weights and stored K/V leave room for."
    )
    table = cols.cells_table(study, "limit", caption, entries)
    return doc.Section("Largest batch", (table,)) if table.rows else None
