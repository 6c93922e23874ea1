"""Every benchmark measure keeps the contract."""

import pytest

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


class TestTask(MeasureContract):
    name, settings = "task", {"tokens": TEXT}


class TestTaskWithoutText(MeasureContract):
    name, is_available = "task", False


class TestRoofline(MeasureContract):
    name = "roofline"


def test_every_measure_has_its_suite_and_another_name_is_refused():
    suites = {suite.name for suite in MeasureContract.__subclasses__()}
    assert suites | set(name_members("measures")) == set(MEASURES)
    with pytest.raises(ValueError, match="should be .*task"):
        BenchmarkConfig(parts=["layers"])
    with pytest.raises((ValueError, UsageError)):
        Measurement(part="layers", metric="layers", variant="toy", value=1, unit="")
