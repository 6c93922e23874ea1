"""What every text source must do. A member's tests inherit `SourceContract`."""

import json
from abc import ABC, abstractmethod

import pytest

from kvlab.data.data_dir import ignore_progress
from kvlab.data.dataset_preparation import dataset_identity, prepare_dataset
from kvlab.data.sources import get_source
from kvlab.errors import DataError
from tests.support.text_files import documents


class SourceContract(ABC):
    """Give `data`: a data section for the source, with at least eight documents of text."""

    reads_files = True

    @pytest.fixture
    @abstractmethod
    def data(self, tmp_path): ...

    @pytest.fixture
    def source(self, data):
        return get_source(data.source)

    def test_identity_units_and_documents_are_repeatable_plain_data(self, source, data):
        first = source.identity(data)
        assert json.loads(json.dumps(first)) == first == source.identity(data)
        units = list(source.units(data, ignore_progress))
        assert json.loads(json.dumps(units)) == units == list(source.units(data, ignore_progress))
        assert len({unit["key"] for unit in units}) == len(units) > 0
        texts = list(source.read(units[0]))
        assert texts
        assert all(isinstance(text, str) for text, _ in texts)
        assert list(source.read(json.loads(json.dumps(units[0])))) == texts

    def test_a_unit_whose_file_is_missing_is_refused(self, source, data):
        if not self.reads_files:
            pytest.skip("it reads no files")
        unit = next(iter(source.units(data, ignore_progress)))
        missing = "/nowhere/at/all.parquet"
        field = {"path": missing} if "path" in unit else {"files": [[missing, "a group"]]}
        with pytest.raises(DataError, match="nowhere"):
            list(source.read({**unit, **field}))

    def test_a_prepared_dataset_holds_its_documents_and_licence(self, source, data):
        data = data.model_copy(
            update={"tokenizer": "bytes", "max_bytes": 100_000, "validation_fraction": 0.3}
        )
        dataset = prepare_dataset(data, workers=1)
        prepared = [*documents(dataset.train, "bytes"), *documents(dataset.validation, "bytes")]
        assert len(prepared) == len(set(prepared))
        missing = set(prepared)
        for unit in source.units(data, ignore_progress):
            missing -= {text for text, _ in source.read(unit)}
            if not missing:
                break
        assert not missing
        assert dataset.licence == source.licence
        assert dataset.identity == dataset_identity(data)
