"""Reports of tuned sweeps, word for word; see `tests.report.test_golden_report`."""

from pathlib import Path

import pytest

from tests.report.reading import load, markdown
from tests.support.golden import check_golden
from tests.support.record_factory import TunedRecord

GOLDEN = Path(__file__).parent / "golden"

RECORDS = {
    "tuned": TunedRecord(),
    "tuned-shorter": TunedRecord(tokens=4096),
    "tuning": TunedRecord(is_over=False),
}


@pytest.mark.parametrize("name", list(RECORDS))
def test_the_report_is_the_golden_one(tmp_path, name):
    check_golden(GOLDEN / f"{name}.txt", markdown(load(RECORDS[name], tmp_path, "tuned")))
