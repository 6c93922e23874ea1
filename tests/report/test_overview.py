"""The first screen: one sentence that agrees with the table, facts of the record, paired figures."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report.document import Figure, Paragraph, Table
from kvlab.report.figures.plot import Line
from kvlab.report.overview import report_overview
from kvlab.report.report_files import make_document
from tests.support.record_factory import Record, no_learned_hybrid

HEADS = {"heads": ("mha", "mqa")}


def load(record, folder, **changes):
    store = record.write(folder)
    if changes:
        store.write_sweep({**store.sweep("made"), **changes})
    return Study.load(store, "made")


def verdict(study):
    lead = next(c for c in report_overview(study) if isinstance(c, Paragraph))
    assert lead.tone == "lead"
    return "".join(span if isinstance(span, str) else span.text for span in lead.spans)


def contents(study, kind):
    return {c.name: c for c in report_overview(study) if isinstance(c, kind)}


def test_the_verdict_names_the_smallest_cache_that_is_shown_to_be_cheap(tmp_path):
    record = Record(factors={"heads": ("mha", "mqa"), "sharing": ("none", "trained")}, noise=1e-4,
                    seeds=(0, 1, 2, 3), effects={"mqa": 0.01, "trained": 0.3})  # fmt: skip
    text = verdict(load(record, tmp_path / "margin", decide={"margin": 0.05}))
    assert text.startswith("The smallest cache that is clearly shown to cost less than 0.05")
    assert "mqa. It stores 4.00\N{MULTIPLICATION SIGN} less K/V than the baseline" in text
    assert "is shown to cost, too: +0.01" in text
    text = verdict(load(record, tmp_path / "none"))
    assert text.startswith("Every smaller cache that was tested is clearly shown to cost.")
    better = Record(factors=HEADS, noise=1e-4, effects={"mqa": -0.1})
    assert "and costs \N{MINUS SIGN}0.1" in verdict(load(better, tmp_path / "better"))


def test_the_verdict_claims_nothing_that_was_not_shown(tmp_path):
    noisy = Record(factors=HEADS, noise=0.1)
    text = verdict(load(noisy, tmp_path / "noisy"))
    assert text.startswith("No smaller cache is clearly shown to cost nothing.")
    text = verdict(load(Record(factors=HEADS, seeds=(0,)), tmp_path / "one"))
    assert text.endswith("one seed does not tell it from noise.")
    failed = Record(factors=HEADS, status=lambda v, _: "failed" if "mha" in v.values() else "done")
    assert "no finished trial" in verdict(load(failed, tmp_path / "failed"))
    text = verdict(load(Record(factors={"position": ("learned", "rope")}), tmp_path / "same"))
    assert text.startswith("No cell stores less K/V than its reference: position=rope ")


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
