"""Models to talk with."""

import pytest

from kvlab.spec import ModelConfig
from tests.support.generated import SHAPE, model, trial  # noqa: F401
from tests.support.trained_trial import make_random_model


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """A folder of GPT-2's type with a vocabulary that kvlab has no tokenizer for."""
    monkeypatch.chdir(tmp_path)
    shape = ModelConfig(**{**SHAPE, "vocab_size": 41})
    make_random_model(shape).save_pretrained(tmp_path / "weights")
    return str(tmp_path / "weights")
