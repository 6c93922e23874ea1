"""What every text source must do. A member's tests inherit `SourceContract`."""

import json
from abc import ABC, abstractmethod

import pytest

from kvlab.data.data_dir import ignore_progress
from kvlab.errors import DataError


class SourceContract(ABC):
    """Give `source` and `data`: a source, and a data section for it with some text."""

    @pytest.fixture
    @abstractmethod
    def source(self): ...

    @pytest.fixture
    @abstractmethod
    def data(self, tmp_path): ...

    def test_identity_is_plain_data_and_stays(self, source, data):
        first = source.identity(data)
        assert json.loads(json.dumps(first)) == first
        assert source.identity(data) == first

    def test_units_are_plain_data_with_keys_of_their_own(self, source, data):
        units = list(source.units(data, ignore_progress))
        assert json.loads(json.dumps(units)) == units
        assert len({unit["key"] for unit in units}) == len(units) > 0
        assert list(source.units(data, ignore_progress)) == units

    def test_a_unit_reads_the_same_after_a_journey_to_another_process(self, source, data):
        unit = next(iter(source.units(data, ignore_progress)))
        texts = list(source.read(unit))
        assert texts
        assert all(isinstance(text, str) for text in texts)
        assert list(source.read(json.loads(json.dumps(unit)))) == texts

    def test_it_says_its_licence_and_its_order(self, source, data):  # noqa: ARG002
        assert source.licence
        assert source.shuffled in (True, False)

    def test_a_unit_whose_file_is_gone_is_refused(self, source, data):
        unit = next(iter(source.units(data, ignore_progress)))
        gone = "/nowhere/at/all.parquet"
        unit = {**unit, "path": gone} if "path" in unit else {**unit, "paths": [gone]}
        with pytest.raises(DataError, match="nowhere"):
            list(source.read(unit))
