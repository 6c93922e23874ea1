"""Every report of the project is what its record gives, byte for byte."""

from pathlib import Path

import pytest

from kvlab.analysis.study import Study
from kvlab.report import write_report
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document, results_csv
from kvlab.report.table_export import table_to_csv, table_to_latex
from kvlab.store.record_archive import extract_archive
from tests.support.extensions import needs, skip_refused
from tests.support.mlflow_contents import read_files

REPORTS = Path(__file__).parents[2] / "reports"
RECORD = "record.tar.xz"
SWEEPS = REPORTS.parent / "sweeps"
NAMES = sorted(path.parent.name for path in REPORTS.glob("*/report.md"))


SEEDS_WERE_ADDED = {"reductions": needs("looks")}
"""After a report, which the section of looks says."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SEEDS_WERE_ADDED.get(name, ())) for name in NAMES]
)
def test_texts_and_tables_are_those_of_the_record(tmp_path, name):
    """Without the figures and the page, which take most of the time."""
    skip_refused(SWEEPS / f"{name}.yaml")
    store = extract_archive(REPORTS / name / RECORD, tmp_path / "record")
    assert store.sweep_names() == [name]
    study = Study.load(store, name)
    document = make_document(study)
    made = {"report.md": render_markdown(document), "results.csv": results_csv(study)}
    for table in document.tables:
        made[f"tables/{table.name}.csv"] = table_to_csv(table)
        made[f"tables/{table.name}.tex"] = table_to_latex(table)
    committed = {path: (REPORTS / name / path).read_text(encoding="utf-8") for path in made}
    assert [path for path in made if made[path] != committed[path]] == []
    assert len(list((REPORTS / name / "tables").iterdir())) == 2 * len(document.tables)


def test_all_files_of_the_quickstart_are_those_of_its_record(tmp_path):
    store = extract_archive(REPORTS / "quickstart" / RECORD, tmp_path / "record")
    write_report(store, "quickstart", tmp_path / "reports")
    made = read_files(tmp_path / "reports" / "quickstart")
    committed = read_files(REPORTS / "quickstart")
    del committed[RECORD]
    ignored = {file for file in made if file.endswith((".png", ".jsonl"))}  # see .gitignore
    made = {file: data for file, data in made.items() if file not in ignored}
    committed = {file: data for file, data in committed.items() if file not in ignored}
    assert ignored
    assert made.keys() == committed.keys()
    assert [file for file in made if made[file] != committed[file]] == []
