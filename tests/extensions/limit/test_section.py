"""The table of largest batches, from lines of trials."""

from kvlab.report.report_files import make_document
from tests.extensions.limit.records import RECORD
from tests.report.reading import load, markdown, rows, tables
from tests.support.record_factory import Record


def test_a_cell_has_the_mean_over_its_seeds_and_its_share_of_the_baseline(tmp_path):
    study = load(RECORD, tmp_path, "limit")
    base, mqa = rows(make_document(study), "limit")
    assert (base["tokens"], base["sequences"], base["by formula"]) == ("128", "32.0", "40.0")
    assert (mqa["sequences"], mqa["of the baseline's"]) == ("128.0", "4.0")
    assert "(8,000 bytes given)" in markdown(study)


def test_trials_without_its_lines_have_no_section(tmp_path):
    assert not tables(make_document(load(Record(), tmp_path, "limit")))
