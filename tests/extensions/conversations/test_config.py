"""`benchmark.conversations`: what a load may be, where a mistake is, and what enters an id."""

from kvlab.spec import Experiment
from kvlab.trial import Trial


def experiment(**conversations):
    given = {"conversations": conversations} if conversations else {}
    model = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 128, "vocab_size": 257}
    return Experiment(name="a", model=model, data={"tokenizer": "bytes"},
                      benchmark={"prompt_tokens": 8, "new_tokens": 8, **given})  # fmt: skip


def trial_id(**conversations):
    return Trial.of(experiment(**conversations), "digest", 0).id


def test_a_load_changes_the_trial_and_its_spelling_does_not():
    assert "conversations" not in experiment().benchmark.identity()
    assert trial_id() != trial_id(turns=4)
    assert trial_id(turns=4) == trial_id(turns={"distribution": "constant", "mean": 4}, count=32)
    assert trial_id(turns=4) != trial_id(turns=4, budget=1000)
