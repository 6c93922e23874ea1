"""The compact ablation: its numbers are those of the report's own tables."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report.ablation import list_ablation
from tests.support.record_factory import TIED_GAP, Record


def load(record: Record, folder) -> Study:
    return Study.load(record.write(folder), record.name)


def test_rows_hold_difference_interval_size_and_gap(tmp_path):
    factors = {"heads": ("mha", "mqa"), "sharing": ("none", "tied")}
    study = load(Record(factors=factors, seeds=tuple(range(6))), tmp_path)
    base, tied, mqa, both = list_ablation(study, 10)
    assert base.levels == study.baseline
    assert (base.difference, base.interval, base.verdict_name) == (None, None, "")
    assert mqa.difference == pytest.approx(0.10, abs=0.02)
    assert mqa.interval[0] < mqa.difference < mqa.interval[1]
    assert mqa.verdict_name == "worse"
    assert (mqa.kv_factor, both.kv_factor) == (4.0, 8.0)
    assert mqa.parameter_change == pytest.approx(-0.03)
    assert tied.gap.value == pytest.approx(TIED_GAP)


def test_a_level_alone_has_the_interval_of_its_effect(tmp_path):
    study = load(Record(factors={"heads": ("mha", "mqa")}), tmp_path)
    (effect,) = study.effects(study.primary_metric)
    row = list_ablation(study, 10)[1]
    assert row.interval == (effect.low, effect.high)


def test_one_seed_has_no_interval(tmp_path):
    study = load(Record(factors={"heads": ("mha", "mqa")}, seeds=(0,)), tmp_path)
    row = list_ablation(study, 10)[1]
    assert (row.interval, row.verdict_name) == (None, "one seed")


def test_a_cell_that_diverged_is_called_so(tmp_path):
    factors = {"heads": ("mha", "mqa"), "position": ("learned", "rope")}

    def status(levels, seed):
        return "diverged" if levels == {"heads": "mqa", "position": "rope"} and seed else "done"

    rows = list_ablation(load(Record(factors=factors, status=status), tmp_path), 10)
    assert rows[-1].verdict_name == "diverged"
    assert rows[-1].interval is None


def test_many_cells_keep_the_baseline_and_the_front(tmp_path):
    study = load(Record(seeds=(0, 1)), tmp_path)
    rows = list_ablation(study, 6)
    assert len(rows) == 6
    assert rows[0].levels == study.baseline
    smallest = min(study.kv_bytes(levels) for levels in study.cells)
    assert smallest in [row.kv_bytes for row in rows]
