"""A sweep that decides recall: its answer, its effects and the section of its groups."""

from kvlab.analysis.study import Study
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS
from kvlab.store.metrics import METRICS
from tests.evaluate.test_token_metrics import FILE
from tests.extensions.recall.records import RECORD, answer
from tests.report.reading import load, rows
from tests.support.record_factory import Record


class Decided(Record):
    def description(self, cells):
        found = super().description(cells)
        return {**found, "decide": {"metric": "recall_served", "margin": 0.02}}


def test_a_users_metric_does_not_take_the_name_of_a_group():
    METRICS.offer([FILE.replace('"rank"\n', '"recall_16_back"\n')])
    assert METRICS["recall_16_back"].title != "rank of the right token"


def test_a_sweep_is_decided_by_recall(tmp_path):
    store = Decided(seeds=(0, 1, 2, 3), change=answer).write(tmp_path)
    study = Study.load(store, "made")
    assert study.primary_metric == "recall_served"
    assert study.one_shot_metric == "recall"
    verdicts = {effect.name: effect.verdict for effect in study.effects("recall_served")}
    assert verdicts["heads=mqa"] == "costs less than 2 points"
    assert verdicts["sharing=trained"] == "costs less than 2 points"
    tied = [verdict for name, verdict in verdicts.items() if name.startswith("sharing=tied")]
    assert set(tied) == {"worse"}
    assert study.ranking("recall_served").best_first(list(study.cells))[0] == study.baseline
    said = render_markdown(make_document(study))
    assert "cost less than 2 points" in said
    assert "Agresti and Coull" in said
    assert "recall_" not in said.split("## Recall")[1].split("## ")[0]


def test_the_section_has_every_group_in_order_and_the_floor(tmp_path):
    section = SECTIONS["recall"].make(load(RECORD, tmp_path))
    assert "Guessing gets 6.25%" in str(section.contents[0])
    table = rows(section, "recall-back")
    assert list(table[0])[:2] == ["cell", "scored"]
    assert [head for head in table[0] if "sd" not in head][2:] == [
        "all (%)", "5\N{EN DASH}8 (%)", "17\N{EN DASH}32 (%)",
    ]  # fmt: skip
    by_pairs = rows(section, "recall-pairs")
    assert [head for head in by_pairs[0] if "sd" not in head][2:] == ["all (%)", "4 (%)", "16 (%)"]
    assert len(table) == len(by_pairs) == 2 * len(RECORD.cells())
    assert "4,000 answers a trial" in str(section.contents[1].columns)
