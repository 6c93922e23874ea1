"""A sweep that decides recall: its answer, its effects and the section of its groups."""

from kvlab.analysis.study import Study
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.sections import SECTIONS
from tests.report.reading import load, rows
from tests.support.record_factory import Record

SHARES = {"none": 0.999, "trained": 0.998, "tied": 0.6}


def answer(result, levels, seed):
    share = SHARES[levels["sharing"]] - 0.0004 * seed - 0.0003 * (levels["heads"] == "mqa")
    groups = {"recall": share, "recall_4_pairs": share, "recall_16_pairs": share - 0.1}
    groups |= {"recall_8_back": share, "recall_32_back": share - 0.2}
    measured = result["measurements"]
    for name, value in groups.items():
        measured |= {name: value, f"{name}_served": value - 0.001, f"{name}_items": 4000}
    measured["recall_chance"] = 1 / 16


RECORD = Record(seeds=(0, 1, 2, 3), change=answer)


class Decided(Record):
    def description(self, cells):
        found = super().description(cells)
        return {**found, "decide": {"metric": "recall_served", "margin": 0.02}}


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
