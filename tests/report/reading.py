"""Read made-up records as studies, and reports of them as text and rows."""

import csv
from pathlib import Path

from kvlab.analysis.study import Study
from kvlab.report.document import Document, Figure, Section, Table
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.table_export import table_to_csv
from tests.support.record_factory import Record


def load(record: Record, folder: Path, *sections: str, **changes: object) -> Study:
    """Write a record and read it as a study; ``changes`` replace keys of its `sweep.json`."""
    store = record.write(folder)
    if changes:
        store.write_sweep({**store.sweep(record.name), **changes})
    return Study.load(store, record.name, sections or None)


def markdown(study: Study) -> str:
    return render_markdown(make_document(study))


def tables(made: Section | Document) -> dict[str, Table]:
    if isinstance(made, Document):
        return {table.name: table for table in made.tables}
    return {one.name: one for one in made.iter_contents() if isinstance(one, Table)}


def figures(made: Section) -> dict[str, Figure]:
    return {one.name: one for one in made.iter_contents() if isinstance(one, Figure)}


def rows(made: Section | Document, name: str) -> list[dict[str, str]]:
    """Return the rows of a table's CSV, each by the heads."""
    return list(csv.DictReader(table_to_csv(tables(made)[name]).splitlines()))
