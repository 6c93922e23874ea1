"""The report of a search: what it answers, and that nothing in it is false of a search."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvlab.analysis.study import Study
from kvlab.errors import RecordDamaged, UsageError
from kvlab.extensions.search.summary import write_confirmation
from kvlab.report import answer_text
from kvlab.report.sections import SEARCH_SECTIONS
from kvlab.spec import load_sweep
from kvlab.track.sweep_summary import find_best_cell, measure_sweep
from tests.contracts.section_contract import ReportSectionContract
from tests.report.reading import load, markdown
from tests.support.golden import check_golden
from tests.support.search_record import (
    EVERY_OUTCOME,
    SearchRecord,
    settings,
    suggest,
    two_objectives,
)
from tests.support.tiny_sweep import write_tiny_sweep


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return load(EVERY_OUTCOME, tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module", params=[n for n in SEARCH_SECTIONS if n != "starts"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory):
    record = SearchRecord(search={"stop_reason": ""})
    record.suggestions = []
    return load(record, tmp_path_factory.mktemp("empty"))


class TestSearchSections(ReportSectionContract):
    table = SEARCH_SECTIONS


def test_the_answer_as_text_has_the_best_and_the_warning(study, empty_study, tmp_path):
    best, _ = answer_text(study).splitlines()
    assert "of trial 2, n_kv_head=2 learning_rate=0.002" in best
    assert answer_text(load(two_objectives(), tmp_path)).count("\n- ") == 2
    assert len(answer_text(empty_study).splitlines()) == 2


def test_a_damaged_best_trial_is_said(tmp_path):
    store = EVERY_OUTCOME.write(tmp_path)
    best = store.sweep("made")["search"]["suggestions"][1]["trial"]
    (store.trial_directory(best) / "result.json").write_text("{}")
    study = Study.load(store, "made")
    words = "This record does not verify. 1 of 8 trials (of trial 2) is not what was written"
    assert words in answer_text(study)
    assert ": 3.2000 nats/token, of trial 2" in answer_text(study), "as the search noted it"


@pytest.mark.parametrize("text", ['question: "a\x1b[31m"', "a: [", "- a", "scales: 5"])
def test_a_forged_text_of_a_search_is_refused(tmp_path, text):
    store = EVERY_OUTCOME.write(tmp_path)
    description = {k: v for k, v in store.sweep("made").items() if k != "schema"}
    store.write_sweep({**description, "yaml": text})
    study = Study.load(store, "made")
    with pytest.raises(RecordDamaged, match="the record of made has no sweep as its text"):
        markdown(study)
    with pytest.raises(RecordDamaged, match="the record of made has no sweep as its text"):
        write_confirmation(study, tmp_path / "made-confirm.yaml")


def test_the_next_sweep_repeats_the_best_on_fresh_seeds(tmp_path):
    write_tiny_sweep(tmp_path)
    record = two_objectives()
    store = record.write(tmp_path / "runs")
    description = {k: v for k, v in store.sweep("made").items() if k != "schema"}
    store.write_sweep({**description, "yaml": "question: q\nexperiment: e.yaml\n"})
    study, path = Study.load(store, "made"), tmp_path / "made-confirm.yaml"
    with pytest.raises(UsageError, match="no\\.yaml would not load: .*e.yaml.* in the folder of"):
        write_confirmation(study, tmp_path / "runs" / "no.yaml")
    assert not (tmp_path / "runs" / "no.yaml").exists()
    # e.yaml has two heads, so the front's trial with four is impossible there
    with pytest.raises(UsageError, match="4"):
        write_confirmation(study, path)
    text = (tmp_path / "e.yaml").read_text().replace("n_head: 2", "n_head: 4")
    (tmp_path / "e.yaml").write_text(text)
    write_confirmation(study, path)
    sweep = load_sweep(path)
    assert sweep.all_seeds == (1, 2, 3, 4, 5)
    assert list(sweep.factors["configuration"]) == ["base", "trial-1", "trial-3", "trial-4"]
    assert sweep.factors["configuration"]["trial-4"] == settings(1, 4e-3)
    with pytest.raises(UsageError, match="exists already; name a new one"):
        write_confirmation(study, path)
    scaled = "question: q\nexperiment: no.yaml\nscales: {wide: {experiment: e.yaml}}\n"
    store.write_sweep({**description, "yaml": scaled, "scale": "wide"})
    write_confirmation(Study.load(store, "made"), tmp_path / "wide-confirm.yaml")
    assert load_sweep(tmp_path / "wide-confirm.yaml").experiment == "e.yaml"


def test_what_mlflow_calls_the_best_keeps_the_limits(study):
    assert study.primary_metric == "loss_served"
    assert find_best_cell(study) == ("p0002",)  # p0009 is better, and over the limit
    metrics = measure_sweep(study)
    assert metrics["sweep/best_loss_served"] == 3.2
    assert "sweep/kv_bytes_within_noise" not in metrics


SECTIONS = ("answer", "best", "next", "front", "unmeasured")
LARGEST = replace(EVERY_OUTCOME, search={**EVERY_OUTCOME.search, "directions": ["maximize"]})
STARTED = [suggest(settings(1, 1e-3), values=[3.0]), suggest(settings(2, 1e-3), "open")]
UNENDED = SearchRecord(suggestions=STARTED, search={"stop_reason": ""})
LOST = [suggest(settings(1, 1e-3), "lost")]
BEYOND = suggest(settings(4, 1e-3), "beyond", values=[3.0], violations={"kv_bytes +1": 1.0})
LIMITED = {"limits": {"kv_bytes": {"at_most": 1024, "at_least": None}}}
RECORDS = {
    "search": (EVERY_OUTCOME, SECTIONS),
    "objectives": (two_objectives(), ("answer", "best")),
    "largest": (LARGEST, ("answer",)),
    "unended": (UNENDED, ("answer", "next")),
    "lost": (SearchRecord(suggestions=LOST), ("answer", "next")),
    "beyond": (SearchRecord(suggestions=[BEYOND], search=LIMITED), ("answer", "next")),
}


@pytest.mark.parametrize("name", list(RECORDS))
def test_the_report_is_the_golden_one(tmp_path, name):
    record, sections = RECORDS[name]
    text = markdown(load(record, tmp_path, *sections))
    check_golden(Path(__file__).parent / "golden" / f"{name}.txt", text)
