"""A trained trial, and `kvlab generate` of it."""

import json

import pytest

from kvlab.cli.main import main
from kvlab.data.tokenizers import load_tokenizer
from kvlab.spec import ModelConfig
from tests.support.trained_trial import make_random_model, write_trained_trial

SHAPE = {"vocab_size": 257, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16}
BYTES = load_tokenizer("bytes")


@pytest.fixture(scope="module")
def model():
    return make_random_model(ModelConfig(**SHAPE)).eval()


@pytest.fixture
def trial(model, tmp_path, monkeypatch):
    """A store that holds one trained trial; gives its id."""
    monkeypatch.chdir(tmp_path)
    return write_trained_trial(tmp_path / "runs", SHAPE, model)


def run(capsys, *words):
    code = main(["generate", *words])
    out = capsys.readouterr()
    assert code == 0, out.err
    return out.out


def rows(capsys, *words):
    found = json.loads(run(capsys, *words, "--json"))["rows"]
    return [row["new_ids"] for row in found]
