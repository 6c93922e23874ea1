"""What extensions add to an experiment enters the fingerprint it belongs to."""

import pytest

from tests.trial.test_fingerprint import both, check_field, experiment, list_added_fields

BLOCKS = {"kv_dtype": "kivi2", "kv_group": 4, "kv_residual": 4}
RECALLS = {
    "data.paths": [], "data.source": "recall", "data.tokenizer": "symbols:544",
    "data.recall": {"pairs": 2, "questions": 2}, "model.vocab_size": 545, "model.block_size": 22,
    "training.batch_tokens": 44, "evaluation.hellaswag": "none",
}  # fmt: skip
OTHER = {
    "benchmark.conversations": {"turns": 1, "prompt_tokens": 4, "reply_tokens": 4},
    "benchmark.memory": 10**9,
    "data.mix": {"docstrings": 0.25, "files": 0.75},
    "data.recall": {"pairs": 2, "questions": 2, "seed": 1},
    "data.subset": "CC-MAIN-2024-10",
    "evaluation.lm_eval": ["piqa"],
    "evaluation.needle": {"lengths": [32]},
    "evaluation.recall": 8,
    "serving.evict": {"keep": 8},
    "serving.kv_residual": 8,
    "training.int8": ["output"],
    "training.kv_residual": 8,
    "training.kv_routing": {"share": 0.5},
}
"""Another value of every field that an extension adds."""

VALUES = {"model.kv": "tied", "serving.kv_rotate": "hadamard", "training.optimizer": "muon"}
"""A value that an extension adds to a field of the core that has one value without."""

IN_BOTH = {
    "benchmark.memory": {"benchmark.parts": ["limit"], "benchmark.memory": 2 * 10**9},
    "data.mix": {"data.source": "mix", "data.mix": {"docstrings": 0.5, "files": 0.5}},
    "data.recall": RECALLS,
    "data.subset": {
        "data.paths": [],
        "data.source": "fineweb-edu-crawl",
        "data.subset": "CC-MAIN-2023-50",
    },
    "serving.kv_residual": {f"serving.{name}": value for name, value in BLOCKS.items()},
    "training.kv_residual": {f"training.{name}": value for name, value in BLOCKS.items()},
}
"""What the experiment has, too, that it is compared with."""


@pytest.mark.parametrize(("key", "value"), (OTHER | VALUES).items())
def test_each_field_enters_the_fingerprint_it_belongs_to(key, value):
    check_field(key, {key: value}, IN_BOTH.get(key, {}))


def test_every_field_is_tried():
    assert set(OTHER) == list_added_fields()


def test_spellings_of_one_eviction_are_equal():
    spelled = {"keep": 8, "by": "recency", "sinks": 4}
    one, same = (experiment({"serving.evict": evict}) for evict in ({"keep": 8}, spelled))
    assert both(one) == both(same)
