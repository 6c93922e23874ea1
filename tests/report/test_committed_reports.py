"""Every report of the project is what its record gives, byte for byte."""

from pathlib import Path

import pytest

from kvlab.report import write_report
from kvlab.store.record_archive import extract_archive
from tests.support.mlflow_contents import read_files

REPORTS = Path(__file__).parents[2] / "reports"
RECORD = "record.tar.xz"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in REPORTS.glob("*/report.md")))
def test_a_report_is_made_again_from_its_record(tmp_path, name):
    store = extract_archive(REPORTS / name / RECORD, tmp_path / "record")
    assert store.sweep_names() == [name]
    write_report(store, name, tmp_path / "reports")
    made, committed = read_files(tmp_path / "reports" / name), read_files(REPORTS / name)
    del committed[RECORD]
    assert made.keys() == committed.keys()
    assert [file for file in made if made[file] != committed[file]] == []
