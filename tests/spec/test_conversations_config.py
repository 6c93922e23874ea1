"""`benchmark.conversations`: what a load may be, where a mistake is, and what enters an id."""

import json

import pytest

from kvlab.errors import SpecError
from kvlab.spec import Experiment, load_experiment, load_sweep
from kvlab.spec.conversations_config import ConversationsConfig, read_trace
from kvlab.trial.fingerprint import trial_fingerprint
from tests.support.spec_files import EXPERIMENT, experiment_errors, write_spec

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


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("turns: ^{distribution: geometric, mean: 3}", "has no largest value; give it a max"),
        ("reply_tokens: {distribution: ^uniform, min: 4}", "needs max and min; give max"),
        ("turns: {distribution: uniform, min: 4, max: ^2}", "max = 2 is below min = 4; swap them"),
        ("turns: {distribution: ^lognormal, mean: 4, max: 5}", "needs mean and sigma; give sigma"),
        ("think_seconds: {distribution: exponential, mean: 3, sigma: ^1}", "is not read by exponential; remove it"),
        ("turns: ^6", "and the tokens of a turn make 144 or more, over block_size = 128; use fewer"),
        ("prompt_tokens: ^{distribution: geometric, mean: 2, max: 300}", "and reply_tokens may exceed block_size = 128 in the first turn; lower a max"),
        ("budgets: ^[4e6, 1e6]", "does not increase; use [1000000, 4000000]"),
        ("block_tokens: ^8", "is read only with a trace; name one, or remove it"),
        ("trace: a.jsonl, turns: ^2", "is given by the trace; remove one of the two"),
    ],
)  # fmt: skip
def test_a_mistake_is_placed_and_says_the_way_out(tmp_path, keys, message):
    """A caret marks the value at fault."""
    column = 1 + written(keys).splitlines()[5].index("^")
    (error,) = experiment_errors(tmp_path, written(keys.replace("^", "")))
    assert error.startswith(f"e.yaml:6:{column}: benchmark.conversations")
    assert message in error


def experiment(**conversations):
    given = {"conversations": conversations} if conversations else {}
    model = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 128, "vocab_size": 257}
    return Experiment(name="a", model=model, data={"tokenizer": "bytes"},
                      benchmark={"prompt_tokens": 8, "new_tokens": 8, **given})  # fmt: skip


def trial_id(**conversations):
    return trial_fingerprint(experiment(**conversations), "digest", 0)


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
    config = loaded.benchmark.conversations
    assert config.trace == str(trace)
    moved = trace.rename(tmp_path / "moved.jsonl")
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1,', ":2:17: Expecting property name"),
        ("[1]", ":2: is not a JSON object"),
        (json.dumps({**MOONCAKE[1], "input_length": 0}), ":2: input_length = 0 is below 1; use 1 or more"),
        (json.dumps({**MOONCAKE[1], "output_length": 1.5}), ":2: output_length = 1.5 is not a whole number"),
        (json.dumps({**MOONCAKE[1], "timestamp": None}), ":2: timestamp = null is not a number"),
        (json.dumps({**MOONCAKE[1], "hash_ids": ["a"]}), ":2: hash_ids.0 = a is not a whole number"),
        (json.dumps({**MOONCAKE[1], "hash_ids": [1, 2, 3]}), ":2: hash_ids has 3 ids where input_length = 672 has 2 blocks"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_a_trace_is_named_at_the_key_of_the_sweep(tmp_path, trace, line, message):
    trace.write_text(f"{json.dumps(MOONCAKE[0])}\n{line}\n")
    write_spec(tmp_path, written("trace: trace.jsonl, block_tokens: 8"))
    text = "question: What?\nexperiment: e.yaml\nfactors: {h: {a: {}, b: {model.n_kv_head: 1}}}\nseeds: [0]\n"
    with pytest.raises(SpecError) as caught:
        load_sweep(write_spec(tmp_path, text, "s.yaml"))
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (6, 26)
    assert f"benchmark.conversations.trace: {trace}{message}" in problem.message


def test_a_recorded_experiment_needs_no_trace(tmp_path):
    config = ConversationsConfig(trace=str(tmp_path / "gone.jsonl"))
    assert ConversationsConfig.model_validate(config.model_dump(mode="json")) == config
