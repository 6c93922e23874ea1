import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvlab.data.tokenizers import load_tokenizer
from kvlab.errors import DataError, UsageError
from kvlab.evaluate import evaluate
from kvlab.evaluate.forward_passes import SILENT
from kvlab.extensions.lm_eval.config import LmEvalTask
from kvlab.extensions.lm_eval.harness import TextScorer, run_tasks
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.trial.model_targets import OpenedModel
from tests.support.compiled_steps import watch_compiled_steps
from tests.support.random_model import random_model


@pytest.fixture(scope="module")
def opened():
    shape = {"vocab_size": 257, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
    model = random_model(ModelConfig(**shape), dtype=torch.float32).eval()
    return OpenedModel("made", model, ServingConfig(), "bytes")


def log_probabilities(opened, ids):
    return opened.model(torch.tensor([ids]))[0].detach().log_softmax(-1)


@pytest.mark.parametrize("served", [False, True])
def test_continuations_own_the_space_before_them(opened, served):
    scorer = TextScorer(opened, load_tokenizer("bytes"), served)
    texts = [("a cat", " sat"), ("a cat ", "sat"), ("", "sat")]
    (one, _), (two, _), (bare, _) = scorer.score_continuations(texts)
    assert one == pytest.approx(two, abs=1e-5)
    ids = list(b"a cat sat")
    rows = log_probabilities(opened, ids[:-1])
    assert one == pytest.approx(sum(float(rows[i - 1, ids[i]]) for i in range(5, 9)), abs=1e-4)
    ids = [256, *b"sat"]
    rows = log_probabilities(opened, ids[:-1])
    assert bare == pytest.approx(sum(float(rows[i - 1, ids[i]]) for i in (1, 2, 3)), abs=1e-4)


def rolling(tokens, prefix, longest):
    """The harness's rule, in terms of inputs and what they predict: the first window as it is,
    each next one from the last token seen, and one that ends the text slid left to full length.
    Yields the inputs and how many of their last predictions count."""
    first = min(longest, len(tokens))
    yield [prefix, *tokens[: first - 1]], tokens[:first]
    done = first
    while done < len(tokens):
        new = min(longest, len(tokens) - done)
        done += new
        yield tokens[done - longest - 1 : done - 1], tokens[done - new : done]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 34, 63, 64, 65, 132])
def test_a_long_text_is_scored_in_the_windows_of_the_harness(opened, length):
    text = ("the quick brown fox jumps over the lazy dog " * 3)[:length]
    total, scored = 0.0, 0
    for inputs, targets in rolling(list(text.encode()), 256, 32):
        assert len(inputs) == min(32, length)
        rows = log_probabilities(opened, inputs)[-len(targets) :]
        total += sum(float(row[token]) for row, token in zip(rows, targets, strict=True))
        scored += len(targets)
    assert scored == length
    scorer = TextScorer(opened, load_tokenizer("bytes"), served=False)
    scores = scorer.score_texts([scorer.split_text(each) for each in ("fox", text)])
    assert scores[1] == pytest.approx(total, abs=1e-3)


def test_texts_of_all_lengths_have_one_compiled_step(opened, monkeypatch):
    sizes = watch_compiled_steps(monkeypatch)
    serving = ServingConfig(compile=True)
    served = TextScorer(replace(opened, serving=serving), load_tokenizer("bytes"), served=True)
    plain = TextScorer(opened, load_tokenizer("bytes"), served=False)
    texts = [plain.split_text("the quick brown fox jumps over it" * n) for n in (1, 2, 5)]
    done = []
    scores = served.score_texts(
        [*texts, []], SimpleNamespace(advance=lambda count, *_: done.append(count), keep=map)
    )
    assert scores == pytest.approx([*plain.score_texts(texts), 0.0], abs=1e-3)
    assert len(sizes) == 1
    assert sum(done) == sum(map(len, texts))


def test_generation_is_greedy_and_ends_where_it_should(opened):
    scorer = TextScorer(opened, load_tokenizer("bytes"), served=False)
    ids = list(b"once")
    for _ in range(8):
        ids.append(int(log_probabilities(opened, ids)[-1, :257].argmax()))
    whole = bytes(ids[4:]).decode("utf-8", "replace")
    answer = scorer.generate("once", {"max_gen_toks": 8})
    assert answer == whole
    stop = whole[3]
    ended = scorer.generate("once", {"max_gen_toks": 8, "until": [stop]})
    assert ended == whole[: whole.index(stop)]


def test_what_cannot_be_generated_or_scored_is_refused(opened):
    scorer = TextScorer(opened, load_tokenizer("bytes"), served=False)
    for options in ({}, *({"max_gen_toks": most} for most in (32, 256, 0, -1))):
        with pytest.raises(UsageError, match=r"is not from 1 to 31, .*block_size = 32; set it"):
            scorer.generate("once", options)
    assert scorer.generate("once", {"max_gen_toks": 31})
    with pytest.raises(UsageError, match="greedily only"):
        scorer.generate("once", {"do_sample": True})
    for pair in (("a cat", ""), ("", "")):
        with pytest.raises(UsageError, match="continuation = '' has no tokens of its own"):
            scorer.score_continuations([("a", "b"), pair])


LETTERS = """\
task: Letters-1
dataset_path: json
dataset_kwargs: {data_files: {test: ITEMS}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{label}}"
doc_to_choice: "{{choices}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 2.0}
"""
QUESTIONS = [("the cat", ["sat down", "sang"], 0), ("a dog", ["ran", "is a very old dog"], 1),
             ("one", ["two", "or more"], 0), ("night", ["fell", "day and night"], 1),
             ("never", ["asked", "read"], 0)]  # fmt: skip


@pytest.fixture
def letters(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    items = tmp_path / "items.jsonl"
    keys = ("question", "choices", "label")
    lines = [json.dumps(dict(zip(keys, q, strict=True))) + "\n" for q in QUESTIONS]
    items.write_text("".join(lines))
    definition = tmp_path / "letters.yaml"
    definition.write_text(LETTERS.replace("ITEMS", str(items)))
    return str(definition)


@pytest.mark.filterwarnings("ignore")
def test_a_task_of_ones_own_is_scored_one_shot_and_served(opened, letters):
    """Against the choices' log-likelihoods, item by item."""
    task = LmEvalTask(task="Letters-1", limit=4, definition=letters)
    tied = OpenedModel("tied", opened.model, ServingConfig(tie="adjacent:2"), "bytes")
    notes = []

    def start_part(note, total):  # noqa: ARG001
        notes.append(note)
        return SILENT

    results = run_tasks(tied, [task], served=True, start_part=start_part)
    expected = {}
    for suffix, served in (("", False), ("_served", True)):
        scorer = TextScorer(tied, load_tokenizer("bytes"), served)
        acc, acc_norm = [], []
        for question, choices, label in QUESTIONS[:4]:
            scores = [
                s for s, _ in scorer.score_continuations([(question, f" {c}") for c in choices])
            ]
            normed = [s / len(c) for s, c in zip(scores, choices, strict=True)]
            acc.append(float(scores.index(max(scores)) == label))
            acc_norm.append(float(normed.index(max(normed)) == label))
        expected |= {f"lm_eval_letters_1_acc{suffix}": acc}
        expected |= {f"lm_eval_letters_1_acc_norm{suffix}": acc_norm}
    entry = results.details["tasks"]["Letters-1"]
    assert entry["outcomes"] == expected
    assert entry["version"] == 2.0
    shares = {name: sum(values) / 4 for name, values in expected.items()}
    assert results.measurements == {**shares, "lm_eval_letters_1_items": 4}
    assert set(notes) == {"lm-eval Letters-1", "lm-eval Letters-1, served"}


@pytest.mark.filterwarnings("ignore")
def test_items_that_are_unavailable_are_an_error_of_the_data(opened, letters, tmp_path):
    (tmp_path / "items.jsonl").unlink()
    task = LmEvalTask(task="Letters-1", definition=letters)
    with pytest.raises(DataError, match="cannot load the items of Letters-1"):
        run_tasks(opened, [task], served=False, start_part=None)


@pytest.mark.filterwarnings("ignore")
def test_an_evaluation_has_the_tasks_and_begins_them_anew(opened, letters):
    task = {"task": "Letters-1", "limit": 4, "definition": letters}
    of = Experiment(
        name="small",
        model=opened.model.config,
        data={"tokenizer": "bytes"},
        evaluation={"loss_tokens": 64, "served": False, "lm_eval": [task]},
        benchmark={"prompt_tokens": 4, "new_tokens": 4},
    )
    text, kept = np.arange(500, dtype=np.uint16) % 256, {}
    found = evaluate(opened.model, SimpleNamespace(validation=text), of, kept=kept)
    alone = run_tasks(opened, of.evaluation.lm_eval, served=False, start_part=lambda *_: SILENT)
    assert found.details["tasks"] == alone.details["tasks"]
    assert alone.measurements.items() <= found.measurements.items()
    assert {name.partition(", pass")[0] for name in kept} == {"validation loss"}
