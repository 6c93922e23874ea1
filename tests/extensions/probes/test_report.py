"""What the report says of the probes."""

from pathlib import Path

import pytest

from kvlab.report.document import Document
from kvlab.report.markdown import render_markdown
from tests.contracts.section_contract import ReportSectionContract
from tests.report.full_record import FullRecord
from tests.report.reading import load
from tests.support.golden import check_golden
from tests.support.record_factory import Record

DEPTHS = (0.0, 0.5, 1.0)


def needle_line(length, depth, levels, seed):
    """Found one-shot everywhere, and served unless tied; 0.1 off at every seed."""
    lost = 4.0 if levels["sharing"] == "tied" else 0.0
    loss = 1.0 + depth + length / 64 + 0.1 * seed
    values = {
        "loss": loss, "loss_absent": 6.0 + 0.1 * seed, "accuracy": 0.5 + 0.01 * seed,
        "loss_served": loss + lost, "loss_absent_served": 6.0 + 0.1 * seed,
        "accuracy_served": 0.25, "loss_change": lost,
    }  # fmt: skip
    values |= {"gain": 5 - depth - length / 64}
    values |= {"gain_served": values["gain"] - 2 * lost}
    errors = {f"{name}_stderr": 0.2 for name in values}
    return {"length": length, "depth": depth, "rows": 8, "chance": 5.5, **values, **errors}


class ProbedRecord(FullRecord):
    """A full record with both probes; ties recall less when served."""

    def measurements(self, levels, seed):
        found = super().measurements(levels, seed) | {"recall_rows": 32, "recall_pairs": 64}
        for ending, less in (("", 0.0), ("_served", 0.125)):
            found |= {f"recall_acc{ending}": 0.5 - less + 0.01 * seed}
            found |= {f"recall_acc_near{ending}": 0.75 - less, f"recall_acc_far{ending}": 0.25}
        return found

    def result(self, levels, seed, status):
        result = super().result(levels, seed, status)
        if status == "done":
            result["needle"] = [needle_line(64, depth, levels, seed) for depth in DEPTHS]
        return result


@pytest.fixture(scope="module")
def name():
    return "probes"


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return load(ProbedRecord(), tmp_path_factory.mktemp("probed"))


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory):
    return load(Record(status=lambda *_: "missing"), tmp_path_factory.mktemp("empty"))


class TestProbes(ReportSectionContract):
    def test_it_reads_as_written(self, name, study):
        said = render_markdown(Document("made", {name: self.table[name].make(study)}))
        check_golden(Path(__file__).with_name("report.txt"), said)
