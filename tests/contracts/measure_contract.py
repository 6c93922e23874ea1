"""The contract of benchmark measures: a test class per member inherits it."""

from importlib import import_module

import pytest

from kvlab.benchmark.measurement import Measurement
from kvlab.spec.benchmark_config import MEASURES
from tests.benchmark.sessions import make_session


class MeasureContract:
    """Holds for every measure on two small variants.

    Attributes:
        name: as in `kvlab.spec.benchmark_config.MEASURES`.
        settings: what the measure needs of `BenchmarkSettings`.
        is_available: whether it can be measured with them on CPU.
    """

    name: str
    settings: dict = {}  # noqa: RUF012
    is_available = True

    @pytest.fixture(scope="class")
    @classmethod
    def measured(cls):
        """The notices and the lines."""
        session, notices = make_session(**cls.settings)
        return notices, list(import_module(MEASURES[cls.name].module).measure(session))

    def test_its_lines_survive_json_and_have_columns_and_what_it_cannot_it_says(self, measured):
        notices, lines = measured
        assert bool(lines) == self.is_available
        assert self.is_available or self.name in notices[0]
        for line in lines:
            assert line.part == self.name
            assert Measurement.model_validate_json(line.model_dump_json()) == line
        layouts = import_module(MEASURES[self.name].module).TABLES
        columns = {column for layout in layouts for column in layout.columns}
        assert {key for layout in layouts for key in layout.keys} <= set(Measurement.model_fields)
        assert {line.metric for line in lines} - {"efficiency"} <= columns
