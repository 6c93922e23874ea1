"""The first screen: one sentence that agrees with the table, facts of the record, paired figures."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report.document import EMPTY_CELL, Figure, Line, Table
from kvlab.report.lead import write_lead
from kvlab.report.overview import ablation_table, report_overview, select_cells
from kvlab.report.report_files import make_document
from tests.support.record_factory import TIED_GAP, Record, no_learned_hybrid

HEADS = {"heads": ("mha", "mqa")}


def load(record, folder, **changes):
    store = record.write(folder)
    if changes:
        store.write_sweep({**store.sweep("made"), **changes})
    return Study.load(store, "made")


def contents(study, kind):
    return {c.name: c for c in report_overview(study) if isinstance(c, kind)}


def test_the_ablation_has_each_cell_against_its_reference(tmp_path):
    factors = {**HEADS, "sharing": ("none", "tied")}
    study = load(Record(factors=factors, seeds=tuple(range(6))), tmp_path)
    base, tied, mqa, both = ablation_table(study).rows
    titles = [column.title for column in ablation_table(study).columns]
    at = {title: titles.index(title) for title in ("verdict", "smaller", "parameters")}
    assert base.cells[2:5] == (EMPTY_CELL,) * 3
    found = study.comparisons[("mqa", "none")]
    assert mqa.cells[2].value == found.value == pytest.approx(0.1, abs=0.02)
    assert mqa.cells[3].csv == (found.low, found.high)
    assert mqa.cells[at["verdict"]].text == "worse"
    assert [row.cells[at["smaller"]].value for row in (mqa, both)] == [4.0, 8.0]
    assert mqa.cells[at["parameters"]].value == pytest.approx(-0.03)
    assert tied.cells[-1].value == pytest.approx(TIED_GAP), "the serving gap"


def test_of_many_cells_the_ablation_keeps_the_baseline_and_the_front(tmp_path):
    study = load(Record(seeds=(0, 1)), tmp_path)
    cells = select_cells(study, 6)
    assert len(cells) == 6
    assert cells[0] == study.baseline
    assert min(map(study.kv_bytes, study.cells)) in map(study.kv_bytes, cells)


def test_the_lead_claims_nothing_that_was_not_measured(tmp_path):
    failed = Record(factors=HEADS, status=lambda v, _: "failed" if "mha" in v.values() else "done")
    (lead,) = write_lead(load(failed, tmp_path / "failed"))
    assert len(lead.spans) == 1, "no cell is named without its reference"
    (lead, *_) = write_lead(load(Record(factors=HEADS, seeds=(0,)), tmp_path / "one"))
    assert lead.spans[0].text == "mqa"
    assert " to " not in lead.spans[-1], "one seed has no interval"


def test_facts_are_those_of_the_record(tmp_path):
    study = load(Record(factors=HEADS), tmp_path)
    (facts,) = (c for c in report_overview(study) if getattr(c, "tone", "") == "muted")
    (text,) = facts.spans
    assert text.startswith("970 k to 1 M parameters · 614 k training tokens · 3 seeds · 6 of 6")


def test_figures_pair_with_the_table(tmp_path):
    """Bars are the intervals of the table, around paired differences; seeds average to them."""
    study = load(Record(exclude=no_learned_hybrid), tmp_path)
    figures, (table,) = contents(study, Figure), contents(study, Table).values()
    assert list(figures) == ["pareto", "effects"]
    rows = {row.cells[0].text: row for row in table.rows}
    size = [column.title for column in table.columns].index("K/V cache")
    inside, beyond, steps, front, references = (
        layer.points if not isinstance(layer, Line) else layer
        for layer in figures["pareto"].plot.layers
    )
    # rotary positions save no byte, so their cell is the reference of those that have them
    assert [(one.y, one.y_range) for one in references] == [(0.0, None)] * 2
    assert "baseline" in [one.label for one in references]
    assert len(front) > 2
    for point in front:
        row = rows[point.label]
        assert point.y == pytest.approx(row.cells[3].value)
        assert point.y_range == pytest.approx(row.cells[4].csv)
        assert sum(point.seeds) / len(point.seeds) == pytest.approx(point.y)
        assert point.x == row.cells[size].value
    assert all(p.y_range is None for p in (*inside, *beyond))
    for one, other in zip(steps.points, steps.points[1:], strict=False):
        assert one.x == other.x or one.y == other.y, "no sloping line"
    # cells with an untrained tie are far worse, and named where they are cut
    assert beyond
    assert max(p.y for p in beyond) < 1.0
    assert all("tied" in p.tip[0] for p in beyond)
    forest = [p for layer in figures["effects"].plot.layers for p in layer.points]
    assert len(forest) == 5
    for point in forest:
        assert sum(point.seeds) / 3 == pytest.approx(point.x)


def test_a_figure_is_shown_once_in_any_choice_of_sections(tmp_path):
    record = Record(factors=HEADS)
    for sections, places in (
        (["answer", "effects", "pareto"], {"answer": ["pareto", "effects"]}),
        (["effects", "pareto"], {"effects": ["effects"], "pareto": ["pareto"]}),
    ):
        study = Study.load(record.write(tmp_path / sections[0]), "made", sections)
        document = make_document(study)
        for name, figures in places.items():
            found = [c.name for c in document.sections[name].contents if isinstance(c, Figure)]
            assert found[: len(figures)] == figures
        names = [figure.name for figure in document.figures]
        assert len(names) == len(set(names))
