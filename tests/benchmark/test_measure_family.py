"""Every benchmark measure keeps the contract."""

import pytest

from kvlab.benchmark.measurement import Measurement
from kvlab.errors import UsageError
from kvlab.own_extensions import name_members
from kvlab.spec.benchmark_config import MEASURES, BenchmarkConfig
from tests.contracts.measure_contract import check_measure

TEXT = [n % 257 for n in range(1000)]
SETTINGS = {"memory": {}, "latency": {}, "throughput": {}, "task": {"tokens": TEXT}, "roofline": {}}


@pytest.mark.parametrize("name", SETTINGS)
def test_it_keeps_the_contract(name):
    check_measure(name, **SETTINGS[name])


def test_the_task_says_that_it_has_no_text():
    check_measure("task", is_available=False)


def test_every_measure_is_tried_and_another_name_is_refused():
    assert {*SETTINGS, *name_members("measures")} == set(MEASURES)
    with pytest.raises(ValueError, match="should be .*task"):
        BenchmarkConfig(parts=["layers"])
    with pytest.raises((ValueError, UsageError)):
        Measurement(part="layers", metric="layers", variant="toy", value=1, unit="")
