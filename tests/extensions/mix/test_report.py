"""A sweep of a mix is decided by what one of its sources measures."""

from kvlab.analysis.study import Study
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS
from tests.extensions.mix.records import answer
from tests.report.reading import load, rows
from tests.support.record_factory import Record


def test_a_source_decides(tmp_path):
    metric = "loss_docstrings_served"

    class Decided(Record):
        def description(self, cells):
            found = super().description(cells)
            return {**found, "decide": {"metric": metric, "margin": 0.05}}

    store = Decided(seeds=(0, 1, 2, 3), change=answer).write(tmp_path)
    study = Study.load(store, "made")
    assert study.primary_metric == metric
    assert study.one_shot_metric == metric.removesuffix("_served")
    effects = study.effects(metric)
    tied = {one.verdict for one in effects if one.name.startswith("sharing=tied")}
    assert tied == {"costs less than 0.05"}
    said = render_markdown(make_document(study))
    assert "nats/token" in said
    table = rows(SECTIONS["mix"].make(study), "mix")
    heads = [head for head in table[0] if "sd" not in head]
    assert heads == ["cell", "scored", "docstrings (nats/token)", "recall (nats/token)"]
    assert len(table) == 2 * len(study.cells)


def test_other_records_have_no_section(tmp_path):
    assert SECTIONS["mix"].make(load(Record(), tmp_path)) is None
