"""Sections that show what few sweeps measure: probes, divergence, tasks, tuned and matched sizes."""

import pytest

from kvlab.analysis.study import Study
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.report.benchmark_plots import benchmark_figures, roofline_figure
from kvlab.report.document import Fold
from kvlab.report.sections import SECTIONS
from tests.report.full_record import line
from tests.report.reading import load, rows
from tests.support.record_factory import (
    LmEvalRecord,
    Record,
    SizedRecord,
)


def make(name, record, folder):
    return SECTIONS[name].make(load(record, folder))


SERVING = ("plain", "coarse", "tied")


def test_rounding_is_no_effect(tmp_path):
    """Of plain caches a divergence of 1e-14 differs surely between cells, and means nothing."""

    def change(found, levels, seed):
        level = SERVING.index(levels["serving"])
        found["measurements"]["serving_kl"] = 1e-14 * (1 + level + seed / 100)
        found["measurements"]["serving_top_changed"] = 0.0

    study = load(Record(factors={"serving": SERVING}, change=change), tmp_path)
    assert {e.verdict for e in study.effects("serving_kl")} == {"identical"}
    other = rows(SECTIONS["effects"].make(study), "effects-other")
    assert not [row for row in other if "KL" in row["measurement"]]


def test_answers_to_other_items_are_not_paired(tmp_path):
    store = LmEvalRecord(factors={"heads": ("mha", "mqa")}, seeds=(0,)).write(tmp_path)
    row = next(r for r in Study.load(store, "made").done_rows if r.levels == ("mqa",))
    tasks = store.tasks(row.trial)
    tasks["letters"]["items"] = "another set"
    path = store.trial_directory(row.trial) / "result.json"
    result = store.result(row.trial)
    files = store.write_details(row.trial, tasks=tasks)
    write_sealed_json(path, {**result, "files": files})
    section = SECTIONS["lm-eval"].make(Study.load(store, "made"))
    assert "1 trial answered other items than the baseline" in str(section.contents[0])


@pytest.mark.parametrize("noise", [0.001, 0.3])
def test_predictions_are_printed_where_they_say_something(tmp_path, noise):
    """One that contains zero and reaches beyond the margin says nothing."""
    section = make("size-trends", SizedRecord(predict=(3e7, 1e8), noise=noise), tmp_path)
    folds = [c for c in section.contents if isinstance(c, Fold) and c.title == "Predictions"]
    contents = [content for fold in folds for content in fold.contents]
    rows = [[*row.cells] for content in contents for row in getattr(content, "rows", ())]
    found = {(row[1].text, row[2].text): row[4].value for row in rows}
    if noise == 0.3:
        assert not found
    else:
        assert found["mqa", "30 M"] == pytest.approx(0.1 - 0.04 * 1.4771, abs=0.01)
        assert found["rope", "100 M"] == pytest.approx(-0.05, abs=0.01)


def test_one_place_makes_no_curve():
    alone = [line("latency", "ttft", 1.0, prompt_tokens=8, cached=True)]
    assert list(benchmark_figures(alone)) == []
    assert roofline_figure(alone, {}) is None
