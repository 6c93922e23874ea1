"""The report's section of tasks. The contract of sections is in tests/report."""

from pathlib import Path

from kvlab.analysis.study import Study
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.report.sections import SECTIONS
from tests.extensions.lm_eval.records import LmEvalRecord
from tests.report.reading import load, markdown
from tests.support.golden import check_golden

SMALL = LmEvalRecord(factors={"heads": ("mha", "mqa")}, seeds=(0,))


def test_the_section_is_the_golden_one(tmp_path):
    text = markdown(load(SMALL, tmp_path, "lm-eval"))
    check_golden(Path(__file__).with_name("report.txt"), text)


def test_answers_to_other_items_are_not_paired(tmp_path):
    store = SMALL.write(tmp_path)
    row = next(r for r in Study.load(store, "made").done_rows if r.levels == ("mqa",))
    tasks = store.details(row.trial, "tasks")
    tasks["letters"]["items"] = "another set"
    path = store.trial_directory(row.trial) / "result.json"
    result = store.result(row.trial)
    files = store.write_details(row.trial, tasks=tasks)
    write_sealed_json(path, {**result, "files": files})
    section = SECTIONS["lm-eval"].make(Study.load(store, "made"))
    assert "1 trial answered other items than the baseline" in str(section.contents[0])
