"""Every section of the table holds to the contract of report sections."""

import re

import pytest

from kvlab.report.sections import SECTIONS
from tests.contracts.section_contract import ReportSectionContract
from tests.report.full_record import RECORD
from tests.report.reading import load, rows, tables
from tests.support.record_factory import (
    LmEvalRecord,
    MatchedRecord,
    QuantizedTrainingRecord,
    Record,
    SizedRecord,
    TunedRecord,
)

OWN_RECORDS = {
    "size-trends": SizedRecord(),
    "tuned": TunedRecord(),
    "matched": MatchedRecord(),
    "quantized-training": QuantizedTrainingRecord(),
    "lm-eval": LmEvalRecord(),
    "divergence": Record(
        status=lambda levels, _: "diverged" if "mqa" in levels.values() else "done"
    ),
}
"""Section -> a record that it reports; the others report the full one."""

RANGE = re.compile(r"[\d.]\s*(to|of|[\u00b1\u00d7\u2013])\s*[-+\u2212]?\d|\u2212\d")


@pytest.fixture(scope="module", params=list(SECTIONS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def full_study(tmp_path_factory):
    return load(RECORD, tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def study(name, full_study, tmp_path_factory):
    own = OWN_RECORDS.get(name)
    return full_study if own is None else load(own, tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory):
    return load(Record(status=lambda *_: "missing"), tmp_path_factory.mktemp("empty"))


class TestSections(ReportSectionContract):
    def test_a_column_of_a_csv_is_text_or_numbers_alone(self, name, study):
        section = self.table[name].make(study)
        for table in tables(section).values():
            texts = {head for c in table.columns if not c.numeric for head in c.csv or (c.title,)}
            for row in rows(section, table.name):
                for head, text in row.items():
                    if text and head not in {*texts, "unit"}:
                        float(text)
                    assert not (head in texts and RANGE.search(text)), (table.name, head)
