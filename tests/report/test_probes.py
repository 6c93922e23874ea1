"""The probes' section: both probes, both ways of scoring, and silence where none was measured."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report.document import SERIES, Figure, Table
from kvlab.report.sections.probes import report_probes
from tests.support.record_factory import Record


class Probed(Record):
    def measurements(self, levels, seed):
        found = super().measurements(levels, seed)
        far = 0.25 if "mqa" in levels.values() else 0.75
        for ending, less in (("", 0.0), ("_served", 0.125)):
            found |= {
                f"recall_acc{ending}": 0.5 - less,
                f"recall_acc_far{ending}": far - less + 0.01 * seed,
                **{f"loss_part{i}{ending}": 5.0 - i / 10 + less for i in range(1, 9)},
            }
            if "rope" in levels.values():
                found[f"loss_beyond{ending}"] = 4.5 + less
        return found | {"recall_rows": 32, "recall_pairs": 64}


def section(record, folder):
    return report_probes(Study.load(record.write(folder), "made"))


def test_nothing_measured_nothing_said(tmp_path):
    assert section(Record(), tmp_path) is None


def test_both_tables_hold_what_was_measured(tmp_path):
    found = section(Probed(seeds=(0, 1, 2)), tmp_path)
    recall, positions = (part for part in found.contents if isinstance(part, Table))
    assert [column.title for column in recall.columns] == ["cell", "scored", "all", "far"]
    by_cell = {(row.cells[0].text, row.cells[1].text): row.cells for row in recall.rows}
    assert len(by_cell) == 2 * 24
    for (name, way), cells in by_cell.items():
        less = 0.125 if way == "served" else 0.0
        far = (0.25 if "mqa" in name else 0.75) - less + 0.01
        assert cells[2].value == pytest.approx(100 * (0.5 - less))
        assert cells[3].value == pytest.approx(100 * far)
        assert cells[3].text == f"{100 * far:.2f} \N{PLUS-MINUS SIGN} 1.00"
    assert [column.title for column in positions.columns][2:] == [
        *(f"{i}/8" for i in range(1, 9)), "beyond",
    ]  # fmt: skip
    for row in positions.rows:
        less = 0.125 if row.cells[1].text == "served" else 0.0
        assert row.cells[2].value == pytest.approx(4.9 + less)
        assert row.cells[9].value == pytest.approx(4.2 + less)
        beyond = row.cells[10].value
        assert (beyond is not None) == ("rope" in row.cells[0].text)
        assert beyond is None or beyond == pytest.approx(4.5 + less)


def test_the_figure_draws_the_served_loss_of_the_cells_nearest_the_baseline(tmp_path):
    found = section(Probed(seeds=(0, 1)), tmp_path)
    (figure,) = (part for part in found.contents if isinstance(part, Figure))
    lines = figure.plot.layers
    assert len(lines) == 8 < 24, "as many as there are colours"
    assert (lines[0].name, {line.role for line in lines}) == ("baseline", set(SERIES))
    drawn = [(point.x, point.y) for point in lines[0].points]
    assert drawn == [pytest.approx((i, 5.0 - i / 10 + 0.125)) for i in range(1, 9)]


class Haystack(Record):
    """One cell finds the needle one-shot and not served, the others find none."""

    def result(self, levels, seed, status):
        line = {"length": 64, "depth": 0.5, "rows": 16, "chance": 5.5, "loss_absent": 6.0}
        gain = {"gain": 3.0 if "rope" in levels.values() else 0.9, "gain_served": 0.3}
        loss = {"loss": 6.0 - gain["gain"], "loss_served": 5.7, "loss_absent_served": 6.0,
                "loss_change": gain["gain"] - 0.3}  # fmt: skip
        line |= {**gain, **loss, "accuracy": 0.75, "accuracy_served": 0.0}
        line |= {f"{name}_stderr": 0.25 for name in (*gain, *loss, "accuracy", "accuracy_served")}
        return super().result(levels, seed, status) | {"needle": [line]}


FACTORS = {"position": ("learned", "rope")}


def test_needles_that_serving_loses_are_marked_and_counted(tmp_path):
    found = section(Haystack(factors=FACTORS, seeds=(0, 1)), tmp_path)
    table = next(part for part in found.contents if getattr(part, "name", "") == "needle")
    tones = {(row.cells[0].text, row.cells[2].text): row.cells[4].tone for row in table.rows}
    assert (tones["rope", "one-shot"], tones["rope", "served"]) == ("good", "bad")
    assert {tones["baseline", way] for way in ("one-shot", "served")} == {""}
    served = next(row for row in table.rows if row.cells[2].text == "served" and row.cells[4].tone)
    assert served.cells[4].text.endswith(", lost")
    assert "at 1 of 2 places, and 1 of these" in found.contents[1].spans[0]


def test_at_one_seed_the_needle_s_error_is_over_rows(tmp_path):
    found = section(Haystack(factors={"position": ("learned",)}, seeds=(0,)), tmp_path)
    table = next(part for part in found.contents if getattr(part, "name", "") == "needle")
    absent, at_half = table.rows[0].cells[3:5]
    assert absent.text == "6.000", "without a recorded error none is shown"
    assert at_half.text == "5.100 \N{PLUS-MINUS SIGN} 0.250"
    assert "at most 0.900 nats/token" in found.contents[1].spans[0]
