"""Predictions at other sizes: printed where they say something."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report.document import Fold, Table
from kvlab.report.sections.sizes import report_size_trends
from tests.support.record_factory import SizedRecord


def predicted_rows(folder, **changes) -> dict[tuple[str, str], tuple[float, float]]:
    study = Study.load(SizedRecord(predict=(3e7, 1e8), **changes).write(folder), "made")
    section = report_size_trends(study)
    assert section is not None
    folds = [
        one for one in section.contents if isinstance(one, Fold) and one.title == "Predictions"
    ]
    tables = [one for fold in folds for one in fold.contents if isinstance(one, Table)]
    return {
        (row.cells[1].text, row.cells[2].text): row.cells[4].value
        for one in tables
        for row in one.rows
    }


def test_a_prediction_above_zero_or_below_it_is_printed(tmp_path):
    rows = predicted_rows(tmp_path, noise=0.001)
    assert rows["mqa", "30 M"] == pytest.approx(0.1 - 0.04 * 1.4771, abs=0.01)
    assert rows["rope", "100 M"] == pytest.approx(-0.05, abs=0.01)


def test_a_prediction_that_holds_zero_and_reaches_beyond_the_margin_is_left_out(tmp_path):
    assert not predicted_rows(tmp_path, noise=0.3)
