"""A text source is added by a class and one line of `kvlab.spec.data_config.SOURCES`."""

import pytest

from kvlab.cli.main import main
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.sources import TextSource
from kvlab.errors import SpecError
from kvlab.spec import load_experiment
from kvlab.spec.data_config import SOURCES, SourceEntry
from kvlab.spec.key_reference import json_schema

EXPERIMENT = """\
name: counting
model: {vocab_size: 257, block_size: 8, n_layer: 1, n_head: 1, n_embd: 8}
data: {source: counting, tokenizer: bytes, max_bytes: 100000}
training: {tokens: 64, batch_tokens: 16, evaluate_tokens: 8}
benchmark: {prompt_tokens: 4, new_tokens: 4}
"""


class Counting(TextSource):
    """Documents that count up to ``last``."""

    licence = "none needed"
    is_shuffled = True

    def __init__(self, last):
        self._last = last

    def identity(self, data):  # noqa: ARG002
        return self._last

    def units(self, data, progress):  # noqa: ARG002
        for first in range(0, self._last, 100):
            yield {"key": f"counting {first}", "first": first}

    def read(self, unit):
        yield from ((f"The number {unit['first'] + index}.", None) for index in range(100))


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    monkeypatch.setitem(SOURCES, "counting", SourceEntry(f"{__name__}:Counting", (2000,)))


def test_yaml_schema_and_command_line_know_it_by_its_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "e.yaml"
    path.write_text(EXPERIMENT)
    dataset = prepare_dataset(load_experiment(path).data)
    assert dataset.train_documents + dataset.validation_documents == 2000
    assert '"counting"' in str(json_schema("experiment")).replace("'", '"')
    options = ["--tokenizer", "bytes", "--max-bytes", "100000"]
    assert main(["data", "prepare", "counting", *options]) == 0
    assert str(dataset.folder) in capsys.readouterr().out
    monkeypatch.delitem(SOURCES, "counting")
    with pytest.raises(SpecError, match=r"e\.yaml:3:.*data\.source = counting is not one of"):
        load_experiment(path)
