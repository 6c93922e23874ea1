"""Divergence in the report: its intervals by scipy, its order, and what is rounding."""

import numpy as np
import pytest
from scipy import stats

from kvlab.analysis.study import Study
from kvlab.report.document import Figure, Table
from kvlab.report.figures import render_inline_svg
from kvlab.report.sections.effects import report_effects
from kvlab.report.sections.serving import report_serving_gap
from tests.support.record_factory import Record

FACTORS = {"serving": ("plain", "coarse", "tied")}
KL = {"plain": 3e-14, "coarse": 2e-6, "tied": 0.01}
CHANGED = {"plain": 0.0, "coarse": 0.002, "tied": 0.11}
WINDOWS = 64


class Served(Record):
    """Divergences that spread by factors over seeds."""

    def measurements(self, levels, seed):
        level = levels["serving"]
        factor = np.random.default_rng([seed, len(level)]).lognormal(0, 0.1)
        found = super().measurements(levels, seed) | {"served_tokens": 256 * WINDOWS}
        for name, values in (("kl", KL), ("top_changed", CHANGED)):
            value = values[level] * factor
            found |= {f"serving_{name}": value, f"serving_{name}_stderr": value / 20}
        return found


def contents(folder, **changes):
    record = Served(factors=FACTORS, **changes)
    study = Study.load(record.write(folder), "made")
    section = report_serving_gap(study)
    table = next(c for c in section.iter_contents() if getattr(c, "name", "") == "serving-divergence"
                 and isinstance(c, Table))  # fmt: skip
    figures = [c for c in section.iter_contents() if isinstance(c, Figure)]
    return study, table, figures


def test_cells_stand_in_the_order_of_their_divergence_with_standard_errors(tmp_path):
    study, table, _ = contents(tmp_path, seeds=(0, 1, 2, 3, 4))
    assert [row.cells[0].text for row in table.rows] == ["coarse", "tied"]
    ends = []
    for row, level in zip(table.rows, ("coarse", "tied"), strict=True):
        values = np.array(list(study.values((level,), "serving_kl").values()))
        # two cells are beyond rounding, so each interval has half of the error
        interval = stats.ttest_1samp(np.log(values), 0).confidence_interval(1 - 0.05 / 2)
        assert row.cells[2].value == pytest.approx(stats.gmean(values))
        assert row.cells[3].csv == pytest.approx(tuple(np.exp(interval)))
        shares = np.array(list(study.values((level,), "serving_top_changed").values()))
        interval = stats.ttest_1samp(shares, 0).confidence_interval(1 - 0.05 / 2)
        assert row.cells[4].value == pytest.approx(100 * shares.mean())
        assert row.cells[5].csv == pytest.approx(tuple(100 * np.array(interval)))
        ends.append(row.cells[3].csv)
    assert ends[0][1] < ends[1][0], "they do not overlap"


def test_at_one_seed_the_error_is_over_windows(tmp_path):
    study, table, _ = contents(tmp_path, seeds=(0,))
    half_width = stats.t.ppf(1 - 0.05 / 2 / 2, WINDOWS - 1) / 20
    (value,) = study.values(("tied",), "serving_kl").values()
    expected = (value * np.exp(-half_width), value * np.exp(half_width))
    assert table.rows[1].cells[3].csv == pytest.approx(expected)
    (share,) = study.values(("tied",), "serving_top_changed").values()
    expected = (100 * share * (1 - half_width), 100 * share * (1 + half_width))
    assert table.rows[1].cells[5].csv == pytest.approx(expected)


def test_the_figure_is_logarithmic(tmp_path):
    _, _, (figure,) = contents(tmp_path, seeds=(0, 1, 2))
    assert figure.plot.x.kind == "log"
    text = render_inline_svg(figure.plot, figure.name, figure.alt)
    assert "1e\N{MINUS SIGN}5" in text
    assert "coarse" in text


def test_a_record_without_it_has_no_such_table(tmp_path):
    section = report_serving_gap(Study.load(Record(factors=FACTORS).write(tmp_path), "made"))
    assert not [
        c for c in section.iter_contents() if getattr(c, "name", "") == "serving-divergence"
    ]


def test_rounding_is_no_effect(tmp_path):
    """Of plain caches a divergence of 1e-14 differs surely between cells, and means nothing."""
    study = Study.load(Rounded(factors=FACTORS, seeds=(0, 1, 2)).write(tmp_path), "made")
    assert {e.verdict for e in study.effects("serving_kl")} == {"identical"}
    section = report_effects(study)
    other = next(c for c in section.iter_contents() if getattr(c, "name", "") == "effects-other")
    assert not [row for row in other.rows if "KL" in row.cells[0].text]


class Rounded(Served):
    def measurements(self, levels, seed):
        level = list(KL).index(levels["serving"])
        exact = {"serving_kl": 1e-14 * (1 + level + seed / 100), "serving_top_changed": 0.0}
        return super().measurements(levels, seed) | exact
