"""The section of trends over sizes, word for word; `KVLAB_REWRITE_GOLDEN=1` writes `golden/`."""

from pathlib import Path

import pytest

from tests.report.reading import load, markdown
from tests.support.golden import check_golden
from tests.support.record_factory import SizedRecord


def is_large_mqa(levels):
    return {"large", "mqa"} <= {*levels.values()}


def lose_large(levels, seed):
    is_lost = is_large_mqa(levels) and levels["position"] == "learned" and seed == 0
    return "diverged" if is_lost else "done"


RECORDS = {
    "sizes": SizedRecord(predict=(3e7, 1e8), noise=0.001),
    "sizes-noisy": SizedRecord(predict=(3e7, 1e8), noise=0.3),
    "sizes-once": SizedRecord(seeds=(0,)),
    "sizes-two": SizedRecord(exclude=is_large_mqa),
    "sizes-diverged": SizedRecord(status=lose_large),
}


@pytest.mark.parametrize("name", list(RECORDS))
def test_the_section_is_the_golden_one(tmp_path, name):
    text = markdown(load(RECORDS[name], tmp_path, "size-trends"))
    check_golden(Path(__file__).parent / "golden" / f"{name}.txt", text)
