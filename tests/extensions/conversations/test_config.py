"""`benchmark.conversations`: what a load may be, where a mistake is, and what enters an id."""

import json

import pytest

from kvlab.extensions.conversations.config import (
    ConversationsConfig,
    ConversationsFields,
    read_trace,
)
from kvlab.spec import Experiment, load_experiment
from kvlab.trial import Trial
from tests.support.spec_files import EXPERIMENT, write_spec

HEAD = EXPERIMENT.replace("new_tokens: 32}", "new_tokens: 32,")
MOONCAKE = [
    {"timestamp": 0, "input_length": 655, "output_length": 52, "hash_ids": [46, 47]},
    {"timestamp": 3052, "input_length": 672, "output_length": 26, "hash_ids": [46, 48]},
]
BAILIAN = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 40,
           "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1, 2, 3]}  # fmt: skip


def written(keys):
    """An experiment whose conversations have these keys, in line 6."""
    return HEAD + f"  conversations: {{{keys}}}}}\n"


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


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    return path


def test_a_trace_is_named_beside_the_spec_and_counts_by_its_contents(tmp_path, trace):
    loaded = load_experiment(write_spec(tmp_path, written("trace: trace.jsonl, block_tokens: 8")))
    config = ConversationsFields.of(loaded.benchmark).conversations
    assert config.trace == str(trace)
    moved = trace.rename(tmp_path / "moved.jsonl")
    recorded = ConversationsConfig.model_validate(config.model_dump(mode="json"))
    assert recorded == config, "a recorded experiment needs no trace"
    same = config.model_copy(update={"trace": str(moved)})
    moved_identity = same.identity()
    assert "turns" not in moved_identity
    moved.write_text(json.dumps(MOONCAKE[0]))
    assert same.identity() != moved_identity


def test_both_public_formats_are_read(tmp_path, trace):
    found = read_trace(str(trace), 10)
    assert (found.block_tokens, found.has_turns) == (512, False)
    assert [one.seconds for one in found.requests] == [0.0, 3.052]
    path = tmp_path / "bailian.jsonl"
    path.write_text(json.dumps(BAILIAN))
    (request,) = read_trace(str(path), 10).requests
    assert (request.seconds, request.turn, request.chat, request.parent) == (61.114, 1, 159, None)
    assert len(read_trace(str(trace), 1).requests) == 1
