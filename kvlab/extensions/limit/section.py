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
        levels: [line for line in cell_lines(study, levels) if line["part"] == "limit"]
        for levels in study.cells
    }
    values = {
        levels: {line["metric"]: line["value"] for line in found} for levels, found in lines.items()
    }
    base = values.get(study.baseline, {}).get("largest_batch")

    def entries(levels: Levels) -> doc.Entries:
        tried = values[levels].get("largest_batch")
        yield "sequences", cols.number_cell(tried, fmt.format_significant)
        ratio = tried / base if tried is not None and base else None
        yield "of the baseline's", cols.number_cell(ratio, fmt.format_ratio)
        formula = values[levels].get("largest_batch_formula")
        yield "by formula", cols.number_cell(formula, fmt.format_significant)

    found = [line for own in lines.values() for line in own]
    if not found:
        return None
    one, notes = found[0], {line["note"] for line in found if line["metric"] == "largest_batch"}
    caption = (
        f"Sequences that fit, each with a prompt of {one['prompt_tokens']:,} tokens and a cache for"
        f" {one['context_length']:,} ({cols.join_names(sorted(notes))}); mean over seeds. By"
        " formula: what weights and stored K/V leave room for."
    )
    return doc.Section("Largest batch", (cols.cells_table(study, "limit", caption, entries),))
