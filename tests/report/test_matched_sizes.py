"""What the report says of sizes that were matched, and effects with and without that."""

import csv
import io

import pytest
from scipy import stats

from kvlab.analysis.study import Study
from kvlab.report.document import Table
from kvlab.report.sections import SECTIONS
from kvlab.report.table_export import table_to_csv
from tests.support.record_factory import MatchedRecord


def tables(record, folder):
    section = SECTIONS["matched"].make(Study.load(record.write(folder), "made"))
    return {
        one.name: list(csv.DictReader(io.StringIO(table_to_csv(one))))
        for one in section.contents
        if isinstance(one, Table)
    }


def test_both_effects_are_shown_where_both_ran(tmp_path):
    found = tables(MatchedRecord(noise=0.002, seeds=tuple(range(6))), tmp_path)["matched-effects"]
    assert [(row["level"], row["sizes"]) for row in found] == [
        ("mqa", "none"),
        ("mqa", "parameters"),
    ]
    for row, expected in zip(found, (0.1, 0.05), strict=True):
        assert float(row["difference (nats/token)"]) == pytest.approx(expected, abs=0.005)
        low, high = (float(row[f"simultaneous 95% {end} (nats/token)"]) for end in ("low", "high"))
        assert 0 < low < expected < high
        assert row["verdict"] == "worse"


def test_the_rows_hold_together(tmp_path):
    """One level in two ways is two tests: the intervals are those at half of alpha."""
    record = MatchedRecord()
    study = Study.load(record.write(tmp_path), "made")
    rows = tables(record, tmp_path / "again")["matched-effects"]
    for row, mode in zip(rows, record.modes, strict=True):
        worse, base = (study.values((heads, mode), "loss_served") for heads in ("mqa", "mha"))
        differences = [worse[seed] - base[seed] for seed in record.seeds]
        test = stats.ttest_1samp(differences, 0.0)
        low, high = test.confidence_interval(1 - 0.05 / 2)
        assert float(row["simultaneous 95% low (nats/token)"]) == pytest.approx(low)
        assert float(row["simultaneous 95% high (nats/token)"]) == pytest.approx(high)


def test_widths_and_sizes_of_every_cell(tmp_path):
    rows = tables(MatchedRecord(), tmp_path)["matched"]
    assert [(row["cell"], row["ffn_dim"]) for row in rows] == [
        ("baseline", "64"),
        ("parameters", "64"),
        ("mqa", "64"),
        ("mqa+parameters", "70"),
    ]
    misses = [float(row["parameters off (%)"]) for row in rows]
    assert misses == pytest.approx([0.0, 0.0, -3.0, -0.1])
