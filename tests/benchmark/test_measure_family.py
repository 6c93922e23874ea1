"""Every benchmark measure keeps the contract, and a new one is a module and a table line."""

import pytest

from kvlab.benchmark import max_batch_search
from kvlab.benchmark.measurement import Measurement
from kvlab.errors import UsageError
from kvlab.own_extensions import name_members
from kvlab.spec.benchmark_config import MEASURES, BenchmarkConfig, MeasureEntry
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


def test_a_new_measure_is_a_module_and_a_table_line(monkeypatch):
    """It counts layers, and is refused without its line. All others have a suite above."""
    suites = {suite.name for suite in MeasureContract.__subclasses__()}
    assert suites | set(name_members("measures")) == set(MEASURES)
    monkeypatch.setitem(MEASURES, "layers", MeasureEntry("toy_measure", "count layers", "parts"))
    enum = Measurement.model_json_schema()["properties"]["part"]["enum"]
    assert enum == list(MEASURES)
    monkeypatch.delitem(MEASURES, "layers")
    with pytest.raises(ValueError, match="should be limit, task"):
        BenchmarkConfig(parts=["layers"])
    with pytest.raises((ValueError, UsageError)):
        Measurement(part="layers", metric="layers", variant="toy", value=1, unit="")
