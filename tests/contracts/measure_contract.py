"""The contract of benchmark measures: a test of every member calls it."""

from importlib import import_module

from kvlab.benchmark.measurement import Measurement
from kvlab.spec.benchmark_config import MEASURES
from tests.benchmark.sessions import make_session


def check_measure(name, is_available=True, **settings):
    """Its lines of two small variants survive JSON and have columns; what it cannot, it says.

    Args:
        name: as in `kvlab.spec.benchmark_config.MEASURES`.
        is_available: whether it can be measured with the settings on CPU.
        settings: what the measure needs of `BenchmarkSettings`.
    """
    session, notices = make_session(**settings)
    module = import_module(MEASURES[name].module)
    lines = list(module.measure(session))
    assert bool(lines) == is_available
    assert is_available or name in notices[0]
    for line in lines:
        assert line.part == name
        assert Measurement.model_validate_json(line.model_dump_json()) == line
    columns = {column for layout in module.TABLES for column in layout.columns}
    keys = {key for layout in module.TABLES for key in layout.keys}
    assert keys <= set(Measurement.model_fields)
    assert {line.metric for line in lines} - {"efficiency"} <= columns
