"""The written report: reproducible, complete, honest about what is missing, and harmless."""

import cProfile
import json
from functools import partial
from pathlib import Path

import pytest

from kvlab.analysis.study import Study
from kvlab.cli.main import main
from kvlab.errors import RecordDamaged, UsageError
from kvlab.fs.sealed_files import read_sealed_json, write_sealed_json
from kvlab.report import answer_text, figures, write_report
from kvlab.report.html_page import render_html
from kvlab.report.markdown import render_markdown
from kvlab.report.report_files import make_document
from kvlab.report.table_export import table_to_latex
from tests.report.full_record import FullRecord
from tests.report.reading import load, markdown
from tests.support.mlflow_contents import read_files
from tests.support.record_factory import Record

SECTIONS = ["answer", "cells", "hellaswag", "provenance"]


def full() -> Record:
    return Record(factors={"heads": ("mha", "mqa"), "sharing": ("none", "tied")}, items=40)


@pytest.fixture(scope="module")
def full_report(tmp_path_factory):
    """A store whose record is not in order, and its report."""
    home = tmp_path_factory.mktemp("full")
    store = full().write(home / "store", order=3)
    return store, write_report(store, "made", home / "reports", SECTIONS)


def test_same_record_same_bytes_in_any_folder_and_order(full_report, tmp_path, monkeypatch):
    first, one = full_report
    second = full().write(tmp_path / "elsewhere" / "b", order=5)
    monkeypatch.chdir(tmp_path)
    old = Path("other") / "made" / "tables" / "old.csv"
    old.parent.mkdir(parents=True)
    old.write_text("from a report with another section")
    two = write_report(second.path, "made", Path("other"), SECTIONS)
    ours, theirs = read_files(one), read_files(two)
    assert ours.keys() == theirs.keys(), "what is old is dropped"
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert {"report.md", "report.html", "results.jsonl", "figures/pareto.svg",
            "figures/pareto.png", "tables/cells.csv"} <= ours.keys()  # fmt: skip
    for path in (first.path.parent, tmp_path):
        assert str(path).encode() not in b"".join(ours.values())


def test_the_answer_as_text_is_the_lead_the_levels_and_what_is_missing(full_report, tmp_path):
    study = Study.load(full_report[0], "made", ["cells"])
    lead, *levels = answer_text(study).splitlines()
    assert not lead.startswith("- ")
    assert all(line.startswith("- ") for line in levels)
    for effect in study.effects(study.primary_metric):
        listed = next(line for line in levels if effect.name in line)
        assert listed.lower().startswith(f"- {effect.verdict}: ")
    assert study.sweep["question"] not in answer_text(study), "who reads it has asked"
    record = Record(status=lambda levels, _: "done" if levels["heads"] == "mha" else "missing")
    partial_answer = answer_text(load(record, tmp_path))
    assert partial_answer.splitlines()[-1].startswith("This report is partial. 36 of 72 trials are")


def test_a_changed_number_is_not_taken(tmp_path):
    record = full()
    store = record.write(tmp_path / "store")
    path = store.trial_directory(record.trial(record.cells()[0], 0)) / "result.json"
    value = store.result(path.parent.name)["measurements"]["loss"]
    text = path.read_text()
    path.write_text(text.replace(json.dumps(value), json.dumps(value + 1), 1))
    found = markdown(Study.load(store, "made"))
    assert "11 of 12 trials are measured (1 damaged)" in found
    assert "does not verify.** 1 of 12 trials" in found
    strict = ["report", "made", "--store", str(store.path), "--reports", str(tmp_path / "out")]
    assert main([*strict, "--strict"]) == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="nosuch is not in the store"):
        write_report(store, "nosuch", tmp_path)


@pytest.mark.parametrize("file", ["timings.json", "reported.json", "search.json"])
def test_a_report_names_the_damaged_files_of_its_sweep(tmp_path, file):
    store = full().write(tmp_path)
    (store.sweep_directory("made") / file).write_text("{")
    assert f"**This record does not verify.** `{file}` is not what was" in markdown(
        Study.load(store, "made", ["answer"])
    )


def turn_negative(value):
    match value:
        case bool() | str() | None:
            return value
        case dict():
            return {k: v if k == "owners" else turn_negative(v) for k, v in value.items()}
        case list():
            return [turn_negative(one) for one in value]
    return -abs(value) - 1


@pytest.mark.parametrize("part", ["curves", "measurements", "benchmark", "kv"])
def test_forged_negative_numbers_end_in_a_report_or_a_refusal(tmp_path, part):
    store = FullRecord().write(tmp_path / "store")
    for path in (tmp_path / "store" / "trials").glob("*/result.json"):
        result = read_sealed_json(path)
        if part in result:
            write_sealed_json(path, {**result, part: turn_negative(result[part])})
    sections = ["answer", "curves", "equal-memory", "roofline", "probes"]
    try:
        write_report(store, "made", tmp_path / "out", sections)
    except RecordDamaged as error:
        assert "has a value that kvlab cannot read" in str(error)


def big_record(levels, seeds=2, points=20):
    """A full factorial with curves and one known effect."""
    factors = {
        f"factor{n}": tuple(f"f{n}-{level}" for level in range(count))
        for n, count in enumerate(levels)
    }
    return Record(factors=factors, effects={"f0-1": 0.1}, seeds=tuple(range(seeds)), points=points)


def calls(work) -> int:
    """Functions called while ``work`` runs, Python's and C's."""
    with cProfile.Profile() as profile:
        work()
    return sum(entry.callcount for entry in profile.getstats())


def test_work_grows_as_trials_do(tmp_path, monkeypatch):
    """Four times the cells, or four times the seeds; a quadratic step would show as sixteen.

    Of everything but the pictures, whose drawing library does the same whatever is drawn.
    """
    monkeypatch.setattr(figures, "render_inline_svg", lambda *_: "")

    def work(store):
        document = make_document(Study.load(store, "made"))
        render_markdown(document)
        render_html(document)
        [table_to_latex(t) for t in document.tables]

    work(big_record((2, 2)).write(tmp_path / "warm"))  # imports

    def count(levels, seeds):
        store = big_record(levels, seeds, points=4).write(tmp_path / f"{levels}{seeds}")
        return calls(partial(work, store))

    small = count((4, 2, 2), 3)
    larger = count((4, 2, 8), 3), count((4, 2, 2), 12)
    assert max(larger) < 4.8 * small, (small, larger)
