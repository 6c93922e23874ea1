"""Reports of made-up searches, word for word; `KVLAB_REWRITE_GOLDEN=1` writes `golden/` anew."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.reading import load, markdown
from tests.support.golden import check_golden
from tests.support.search_record import (
    EVERY_OUTCOME,
    SearchRecord,
    settings,
    suggest,
    two_objectives,
)

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
