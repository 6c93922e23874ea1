"""Every benchmark measure keeps the contract."""

import pytest

from kvlab.benchmark import max_batch_search
from kvlab.benchmark.measurement import Measurement
from kvlab.errors import UsageError
from kvlab.own_extensions import name_members
from kvlab.spec.benchmark_config import MEASURES, BenchmarkConfig
from tests.contracts.measure_contract import MeasureContract

TEXT = [n % 257 for n in range(1000)]


class TestMemory(MeasureContract):
    name = "memory"


class TestLatency(MeasureContract):
    name = "latency"


class TestThroughput(MeasureContract):
    name = "throughput"


class TestLimit(MeasureContract):
    name, settings = "limit", {"memory": 1_000_000}

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _three_fit(cls):
        """Instead of processes that try: `test_max_batch` has those."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(max_batch_search, "fits_in_new_process", lambda _, batch: batch <= 3)
            yield


class TestLimitOfUnknownMemory(MeasureContract):
    name, is_available = "limit", False


class TestTask(MeasureContract):
    name, settings = "task", {"tokens": TEXT}


class TestTaskWithoutText(MeasureContract):
    name, is_available = "task", False


class TestRoofline(MeasureContract):
    name = "roofline"


def test_every_measure_has_its_suite_and_another_name_is_refused():
    suites = {suite.name for suite in MeasureContract.__subclasses__()}
    assert suites | set(name_members("measures")) == set(MEASURES)
    with pytest.raises(ValueError, match="should be limit, task"):
        BenchmarkConfig(parts=["layers"])
    with pytest.raises((ValueError, UsageError)):
        Measurement(part="layers", metric="layers", variant="toy", value=1, unit="")
