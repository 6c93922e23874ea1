"""Every section of the table holds to the contract of report sections."""

import pytest

from kvlab.analysis.study import Study
from kvlab.report.sections import SECTIONS
from tests.contracts.section_contract import ReportSectionContract
from tests.report.full_record import RECORD
from tests.support.record_factory import (
    LmEvalRecord,
    MatchedRecord,
    QuantizedTrainingRecord,
    Record,
    SizedRecord,
    TunedRecord,
)


@pytest.fixture(scope="module", params=list(SECTIONS))
def name(request):
    return request.param


@pytest.fixture(scope="module")
def full_study(tmp_path_factory):
    return Study.load(RECORD.write(tmp_path_factory.mktemp("store")), "made")


@pytest.fixture(scope="module")
def sized_study(tmp_path_factory):
    return Study.load(SizedRecord().write(tmp_path_factory.mktemp("sizes")), "made")


@pytest.fixture(scope="module")
def tuned_study(tmp_path_factory):
    return Study.load(TunedRecord().write(tmp_path_factory.mktemp("tuned")), "made")


@pytest.fixture(scope="module")
def matched_study(tmp_path_factory):
    return Study.load(MatchedRecord().write(tmp_path_factory.mktemp("matched")), "made")


@pytest.fixture(scope="module")
def task_study(tmp_path_factory):
    return Study.load(LmEvalRecord().write(tmp_path_factory.mktemp("tasks")), "made")


@pytest.fixture(scope="module")
def diverged_study(tmp_path_factory):
    record = Record(status=lambda levels, _: "diverged" if "mqa" in levels.values() else "done")
    return Study.load(record.write(tmp_path_factory.mktemp("diverged")), "made")


@pytest.fixture(scope="module")
def quantized_study(tmp_path_factory):
    return Study.load(QuantizedTrainingRecord().write(tmp_path_factory.mktemp("int8")), "made")


@pytest.fixture(scope="module")
def study(
    name,
    full_study,
    sized_study,
    tuned_study,
    matched_study,
    diverged_study,
    task_study,
    quantized_study,
):
    special = {
        "size-trends": sized_study,
        "tuned": tuned_study,
        "matched": matched_study,
        "quantized-training": quantized_study,
        "divergence": diverged_study,
        "lm-eval": task_study,
    }
    return special.get(name, full_study)


@pytest.fixture(scope="module")
def empty_study(tmp_path_factory):
    record = Record(status=lambda _levels, _seed: "missing")
    return Study.load(record.write(tmp_path_factory.mktemp("empty")), "made")


class TestSections(ReportSectionContract):
    pass
