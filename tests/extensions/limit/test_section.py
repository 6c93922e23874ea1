"""The table of largest batches, from lines of trials."""

from kvlab.report.report_files import make_document
from tests.report.full_record import line
from tests.report.reading import load, markdown, rows, tables
from tests.support.record_factory import Record

FITTING = {("mha", 0): (30, 40), ("mha", 1): (34, 40), ("mqa", 0): (128, 130)}


def add_lines(result, levels, seed):
    if result["status"] == "done":
        tried, by_formula = FITTING[levels["heads"], seed]
        place = {"prompt_tokens": 96, "context_length": 128, "note": "8,000 bytes given"}
        result["benchmark"] = [
            line("limit", "largest_batch", tried, **place),
            line("limit", "largest_batch_formula", by_formula, **place),
        ]


def status(levels, seed):
    return "done" if (levels["heads"], seed) in FITTING else "failed"


def test_a_cell_has_the_mean_over_its_seeds_and_its_share_of_the_baseline(tmp_path):
    made = {"factors": {"heads": ("mha", "mqa")}, "seeds": (0, 1)}
    study = load(Record(**made, status=status, change=add_lines), tmp_path, "limit")
    base, mqa = rows(make_document(study), "limit")
    assert (base["sequences"], base["by formula"]) == ("32.0", "40.0")
    assert (mqa["sequences"], mqa["of the baseline's"]) == ("128.0", "4.0")
    assert "(8,000 bytes given)" in markdown(study)


def test_trials_without_its_lines_have_no_section(tmp_path):
    assert not tables(make_document(load(Record(), tmp_path, "limit")))
