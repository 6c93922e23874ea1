"""What the report says of settings that were tuned, and its numbers."""

import csv
import io

import numpy as np
import pytest

from kvlab.analysis.study import Study
from kvlab.report.document import Figure, Line, Points, Table
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS
from kvlab.report.table_export import table_to_csv
from tests.support.record_factory import TUNED_LOSSES, TunedRecord


def contents(record, folder, kind):
    section = SECTIONS["tuned"].make(Study.load(record.write(folder), "made"))
    return [one for one in section.contents if isinstance(one, kind)]


def test_the_tables_hold_what_was_found_and_what_it_follows_from(tmp_path):
    found, losses = (
        list(csv.DictReader(io.StringIO(table_to_csv(table))))
        for table in contents(TunedRecord(), tmp_path, Table)
    )
    assert [(row["architecture"], row["tuned"], row["recipe"]) for row in found] == [
        ("baseline", "0.00228", "0.0006"),
        ("mqa", "0.004", "0.0006"),
    ]
    assert [row["error (%)"] for row in found] == ["5.0", ""]
    fit = np.polyfit(np.log([1e-3, 2e-3, 4e-3]), [4.25, 4.05, 4.15], 2)
    for side, rate in (("lower", 1.14e-3), ("higher", 4.56e-3)):
        change = np.polyval(fit, np.log(rate)) - 4.03  # from the loss that the record has
        assert float(found[0][f"a step {side} (nats/token)"]) == pytest.approx(change)
    assert float(found[1]["a step lower (nats/token)"]) == pytest.approx(0.1)
    assert found[1]["a step higher (nats/token)"] == ""  # it diverged
    assert [row["why"] for row in found] == ["vertex", "the least measured, beside a divergence"]
    expected = [pair for points in TUNED_LOSSES.values() for pair in points.values()]
    assert len(losses) == len(expected)
    for row, pair in zip(losses, expected, strict=True):
        if None in pair:
            assert row["loss (nats/token)"] == row["loss sd (nats/token)"] == ""
        else:
            assert float(row["loss (nats/token)"]) == pytest.approx(sum(pair) / 2)
            assert float(row["loss sd (nats/token)"]) == pytest.approx(0.1 / 2**0.5)


def test_the_figure_has_a_line_and_a_best_for_each_architecture(tmp_path):
    (figure,) = contents(TunedRecord(), tmp_path, Figure)
    lines = [one for one in figure.plot.layers if isinstance(one, Line)]
    marks = [one.points[0] for one in figure.plot.layers if isinstance(one, Points)]
    assert [[point.x for point in line.points] for line in lines] == [[1e-3, 2e-3, 4e-3]] * 2
    assert [(mark.x, mark.y) for mark in marks] == [(2.28e-3, 4.03), (4e-3, 4.25)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": 4096}, ("fewer tokens (4,096)", "`mqa` has the least", "diverged at 1 of 2")),
        ({"is_over": False}, ("The tuning is not over",)),
    ],
)
def test_what_weakens_the_tuning_is_said(tmp_path, changes, words):
    store = TunedRecord(**changes).write(tmp_path)
    text = render_markdown(make_document(Study.load(store, "made", ["tuned"])))
    assert all(one in text for one in words)
