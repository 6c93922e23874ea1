"""The texts of users' files in a report: of every trial, or with the trials that have each."""

import yaml

from kvlab.report import document as doc
from kvlab.report.formatting import format_settings
from kvlab.report.sections.record import report_provenance
from tests.report.reading import load
from tests.support.record_factory import Record


def _list_files(folder, text_of):
    def change(result, levels, _seed):
        result["experiment"]["extensions"] = {"mine.py": text_of(levels)}

    study = load(Record(change=change), folder)
    blocks = [one for one in report_provenance(study).contents if isinstance(one, doc.Block)]
    return study, [(one.title, one.text) for one in blocks if one.language == "python"]


def test_a_file_of_all_trials_is_there_once(tmp_path):
    assert _list_files(tmp_path, lambda _levels: "x = 1\n")[1] == [("mine.py", "x = 1\n")]


def test_texts_that_differ_have_their_trials(tmp_path):
    first: list[object] = []

    def choose(levels):
        first.append(levels)
        return "x = 1\n" if levels == first[0] else "x = 2\n"

    study, files = _list_files(tmp_path, choose)
    assert {text for _, text in files} == {"x = 1\n", "x = 2\n"}
    named = {one for title, _ in files for one in title.removeprefix("mine.py of ").split(", ")}
    assert named == {row.trial for row in study.done_rows}


def test_maps_of_settings_can_be_pasted_into_a_sweep():
    patch = {"serving.kv_dtype": {"k": {"mine": {"bits": 3, "signed": True}}, "v": "int8"}}
    text = format_settings({"model.n_kv_head": 1, **patch})
    assert text == (
        "model.n_kv_head: 1, serving.kv_dtype: {k: {mine: {bits: 3, signed: true}}, v: int8}"
    )
    assert yaml.safe_load(f"{{{text}}}") == {"model.n_kv_head": 1, **patch}
