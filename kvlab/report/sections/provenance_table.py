"""Provenance: how to reproduce the numbers."""

from collections import Counter

from kvlab.analysis.study import Study
from kvlab.humanize import format_count
from kvlab.report.document import (
    Block,
    Cell,
    Code,
    Column,
    Content,
    Row,
    Section,
    Table,
    cell,
    paragraph,
)
from kvlab.report.record_warnings import count_values, list_warnings


def report_provenance(study: Study) -> Section:
    """List commands, versions, devices, data and the sweep's YAML."""
    contents: list[Content] = [
        paragraph("Computed by ", Code(str(study.sweep.get("command") or "kvlab submit")), "."),
        paragraph(
            "This report is a pure function of the record; the same record gives the same bytes."
            " Make it again with ",
            Code(f"kvlab report {study.name}{_sections_option(study)}"),
            ". ",
            Code(f"kvlab explain NUMBER --sweep {study.name}"),
            " follows a number of it to its trials, and computes it again.",
        ),
    ]
    recorded = [row.record["provenance"] for row in study.rows if row.record.get("provenance")]
    if recorded:
        counts = count_values(recorded)
        contents += list_warnings(study)
        contents.append(_table(counts))
    for title, key in (("The sweep", "yaml"), ("The base experiment", "experiment_yaml")):
        if study.sweep.get(key):
            contents.append(Block(title, str(study.sweep[key]), "yaml"))
    return Section("Provenance", tuple(contents), is_appendix=True)


def _sections_option(study: Study) -> str:
    """Return the option that selects these sections, if they are not the sweep's own."""
    own_sections = (study.sweep.get("report") or {}).get("sections")
    if study.sections is None or list(study.sections) == own_sections:
        return ""
    return f" --sections {','.join(study.sections)}"


def _table(counts: dict[str, Counter[str]]) -> Table:
    rows = [
        Row((cell(name), Cell(value, value, code=True), cell(f"{count:,}", count)))
        for name, values in counts.items()
        for value, count in sorted(values.items())
    ]
    columns = (Column("what"), Column("value"), Column("trials", True))
    caption = (
        f"What ran, over {format_count(max(sum(v.values()) for v in counts.values()), 'trial')}."
    )
    return Table("provenance", caption, columns, tuple(rows))
