"""`result.json`: what is refused, and what is computed for it."""

import json
import os

import pytest

from kvlab.errors import MeasurementError
from kvlab.layout import KVLayout
from kvlab.spec import Experiment
from kvlab.store.provenance import DataProvenance, Machine
from kvlab.store.result import TrialMeasurements, describe_experiment, describe_kv

EXPERIMENT = {
    "name": "x",
    "model": {"vocab_size": 257, "block_size": 16, "n_layer": 4, "n_head": 2, "n_embd": 8},
    "data": {"source": "files", "paths": ["/srv/somebody/books", "notes/a.txt"], "tokenizer": "bytes"},
    "benchmark": {"prompt_tokens": 4, "new_tokens": 4},
    "serving": {"tie": "adjacent:2"},
}  # fmt: skip


DATA = DataProvenance("i", "d", "none", "bytes")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("loss", float("nan"), "loss = "),
        ("loss", -float("inf"), "loss = "),
        ("toy", 1.0, "toy is measured but not in the table"),
    ],
)
def test_a_number_can_be_compared_and_is_in_the_table(name, value, message):
    with pytest.raises(MeasurementError, match=message):
        TrialMeasurements({name: value}, {}, {}, Machine("cpu", 1), DATA)


def test_the_configuration_is_kept_and_can_be_read_again():
    experiment = Experiment.model_validate(EXPERIMENT)
    facts = json.loads(json.dumps(describe_experiment(experiment)))
    assert facts["data"]["paths"] == ["books", os.path.join("notes", "a.txt")]
    assert Experiment.model_validate(facts).model == experiment.model


def test_the_recorded_kv_facts_are_those_of_the_layout():
    experiment = Experiment.model_validate(EXPERIMENT)
    layout = KVLayout.of(experiment.model, experiment.serving)
    facts = describe_kv(experiment)
    assert facts["owners"] == [0, 0, 2, 2]
    assert facts["bytes_at_block_size"] == layout.stored_bytes(1, 16, "float32")
    assert facts["bytes_at_block_size"] == 2 * 2 * 16 * 8 * 4  # K and V, 2 slots, tokens, width
    assert facts["bytes_per_token"] == 2 * 2 * 8 * 4
