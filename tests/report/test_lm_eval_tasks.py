import pytest

from kvlab.analysis.study import Study
from kvlab.fs.sealed_files import write_sealed_json
from kvlab.report.document import Table
from kvlab.report.sections.tasks import report_lm_eval
from kvlab.report.table_export import table_to_csv
from tests.support.record_factory import LmEvalRecord

RECORD = LmEvalRecord(factors={"heads": ("mha", "mqa")}, seeds=(0,))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return RECORD.write(tmp_path_factory.mktemp("store"))


def tables(store):
    section = report_lm_eval(Study.load(store, "made"))
    return {one.name: one for one in section.iter_contents() if isinstance(one, Table)}


def test_items_are_paired_with_the_baselines(store):
    """mqa answers 20 of 40 items wrong that mha has right, and none the other way round."""
    found = tables(store)
    (row,) = found["lm-eval-letters-acc"].rows
    texts = [one.text for one in row.cells]
    assert texts[0] == "mqa"
    assert texts[3:5] == ["0", f"{20 * len(RECORD.seeds)}"]
    assert texts[-1] == "fewer right"
    assert row.cells[1].value == pytest.approx(-50.0)
    p = row.cells[5].value
    assert p == pytest.approx(2 * 0.5**20), "McNemar's exact test: items are the units"


def test_numbers_have_the_error_over_items(store):
    lines = table_to_csv(tables(store)["lm-eval"]).splitlines()
    assert lines[0].startswith("cell,letters acc (%)")
    _, mean, error, perplexity, _ = lines[1].split(",")
    assert float(mean) == pytest.approx(75.0)
    assert float(error) == pytest.approx(100 * (0.75 * 0.25 / 39) ** 0.5)
    assert float(perplexity) == pytest.approx(20.0 + sum(RECORD.seeds) / len(RECORD.seeds))


def test_other_items_are_not_paired(store):
    row = next(r for r in Study.load(store, "made").done_rows if r.levels == ("mqa",))
    tasks = store.tasks(row.trial)
    tasks["letters"]["items"] = "another set"
    path = store.trial_directory(row.trial) / "result.json"
    files = store.write_details(row.trial, tasks=tasks)
    write_sealed_json(path, {**store.result(row.trial), "files": files})
    section = report_lm_eval(Study.load(store, "made"))
    text = str(section.contents[0])
    assert "1 trial answered other items than the baseline" in text
