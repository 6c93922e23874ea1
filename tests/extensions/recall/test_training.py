"""Targets: the loss of a step and of a text is the mean over answers, however it is divided."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.data.batches import get_training_batch, window_starts
from kvlab.data.bigram_table import score_tables
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.evaluate import evaluate
from kvlab.evaluate.evaluation import select_scored_text
from kvlab.extensions.recall.source import draw_documents, write_tokens
from kvlab.model import GPT
from kvlab.train.train_step import TrainStepper
from tests.extensions.recall.recalls import experiment, read_document
from tests.support.process_group import run_two
from tests.support.random_model import random_model


def text(of, count=120):
    """Documents of one number of pairs, each after an end of text."""
    config = of.data.recall
    rows = write_tokens(config, draw_documents(config, config.pairs[-1], 0, count))
    tokens = np.insert(rows, 0, of.data.vocabulary.end_of_text, 1).ravel().astype(np.uint16)
    return SimpleNamespace(train=tokens, validation=tokens)


def uneven(of):
    """Random tokens, so that rows differ in how many of them are targets; one row has none."""
    tokens = np.random.default_rng(5).integers(0, of.data.vocab_size, 4000).astype(np.uint16)
    return SimpleNamespace(train=tokens, validation=tokens)


def plain_loss(of, model, x, y):
    """The mean over answers, in PyTorch's own words."""
    (ids,) = of.data.target_ids
    masked = torch.where((y >= ids[0]) & (y <= ids[-1]), y, -100)
    return F.cross_entropy(model(x).flatten(0, 1), masked.flatten())


def step_batch(of, data):
    return tuple(
        torch.from_numpy(part)
        for part in get_training_batch(
            data.train, seed=0, step=0, batch_size=8, block_size=of.model.block_size,
            parts=of.data.parts,
        )
    )  # fmt: skip


@pytest.mark.usefixtures("code_path")
@pytest.mark.parametrize("make_text", [text, uneven])
@pytest.mark.parametrize("rows", [8, 4, 1])
def test_loss_and_gradient_of_a_step_are_the_mean_over_its_answers(make_text, rows):
    of = experiment()
    of = experiment(resources={"microbatch_tokens": rows * of.model.block_size})
    data = make_text(of)
    stepper = TrainStepper(GPT(of.model, seed=0).double(), data, of, seed=0)
    loss = stepper.accumulate_gradient(0)
    model = GPT(of.model, seed=0).double()
    expected = plain_loss(of, model, *step_batch(of, data))
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-6  # the sum is in float32
    for own, plain in zip(stepper.model.parameters(), model.parameters(), strict=True):
        assert (own.grad - plain.grad).abs().max() < 1e-10


def test_a_batch_without_answers_has_no_gradient():
    of = experiment()
    tokens = np.full(500, of.data.vocabulary.end_of_text, np.uint16)
    data = SimpleNamespace(train=tokens, validation=tokens)
    stepper = TrainStepper(GPT(of.model, seed=0), data, of, seed=0)
    assert float(stepper.accumulate_gradient(0)) == 0.0
    assert all(not p.grad.any() for p in stepper.model.parameters() if p.grad is not None)


@pytest.mark.parametrize("documents", [1, 2])
def test_windows_begin_with_documents(documents):
    of = experiment()
    (part,) = of.data.parts
    length = part.document_tokens
    of = experiment(model={"block_size": documents * length})
    data = text(of)
    seen = set()
    for step in range(30):
        x, y = get_training_batch(
            data.train, seed=3, step=step, batch_size=4, block_size=of.model.block_size,
            parts=[part],
        )  # fmt: skip
        assert (x[:, ::length] == of.data.vocabulary.end_of_text).all()
        assert (y[:, :-1] == x[:, 1:]).all()
        seen |= {row.tobytes() for row in x}
    assert len(seen) >= 117 / documents, "in an epoch all but one window is read"


@settings(max_examples=50)
@given(st.integers(60, 3000), st.integers(1, 12), st.integers(1, 4), st.integers(0, 9))
def test_aligned_windows_are_inside_the_text_and_differ(tokens, length, documents, seed):
    block = length * documents
    if tokens <= block:
        return
    count = max(1, tokens // block - 1)
    starts = window_starts(
        np.arange(count), tokens=tokens, block_size=block, seed=seed, document_tokens=length
    )
    assert len(set(starts.tolist())) == count
    assert (starts % length == 0).all()
    assert starts.min() >= 0
    assert starts.max() + block + 1 <= tokens


def test_the_validation_loss_and_its_floor_are_over_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    of = experiment({"pairs": [2, 4], "questions": 2, "documents": 3000})
    data = prepare_dataset(of.data, workers=1)
    stepper = TrainStepper(GPT(of.model, seed=0).double(), data, of, seed=0)
    x = torch.from_numpy(data.validation[:].astype(np.int64))
    length = of.model.block_size
    windows = len(x) // length
    picked = [length * (i * ((len(x) - 1) // length) // 10) for i in range(10)]
    assert windows > 100
    inputs = torch.stack([x[start : start + length] for start in picked])
    targets = torch.stack([x[start + 1 : start + 1 + length] for start in picked])
    expected = plain_loss(of, stepper.model, inputs, targets).item()
    assert stepper.validation_loss() == pytest.approx(expected, abs=1e-6)
    scored, _ = select_scored_text(data.validation, of)
    tables = score_tables(
        data.train, scored, seed=0, windows=2000, vocab_size=of.data.vocab_size,
        parts=of.data.parts,
    )  # fmt: skip
    assert tables["loss_bigram"] == pytest.approx(np.log(3), abs=0.02), "a guess among 3 values"


def measure(of, data, model):
    return evaluate(model, data, of).measurements


@pytest.mark.parametrize(
    ("recall", "serving"),
    [
        ({"pairs": [2, 4], "questions": 2, "documents": 600}, {}),
        ({"form": "separate", "documents": 600}, {"tie": "adjacent:2"}),
    ],
)
def test_recall_is_counted_as_a_loop_counts_it(recall, serving, tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    of = experiment(recall, serving=serving)
    data = prepare_dataset(of.data, workers=1)
    model = random_model(of.model)
    config, (ids,), length = of.data.recall, of.data.target_ids, of.model.block_size
    scored, served = select_scored_text(data.validation, of)
    assert len(served) == len(scored) == 20
    measured = measure(of, data, model)
    hits, nats, groups = {"": [], "_served": []}, [], {}
    for start in scored.starts.tolist():
        row = data.validation[start : start + length].astype(int).tolist()
        pairs, questions = read_document(config, row[1:])
        x = torch.tensor([row])
        cache = model.new_cache(1, length, of.serving)
        steps = [model(x[:, i : i + 1], cache=cache)[0, 0] for i in range(length)]
        logits = {"": model(x)[0], "_served": torch.stack(steps)}
        place_of = {key: place for key, _, place in pairs}
        for key, _, place in questions:
            answer = row[1 + place]
            assert answer in ids
            for suffix, own in logits.items():
                hits[suffix].append(int(own[place].argmax()) == answer)
            nats.append(F.cross_entropy(logits[""][place], x[0, 1 + place]).item())
            distance = place - 1 - place_of[key]
            back = next(2**n for n in range(20) if distance <= 2**n)
            for name in (f"{len(pairs)}_pairs", f"{back}_back"):
                groups.setdefault(name, []).append(len(nats) - 1)
    assert measured["loss_tokens"] == measured["served_tokens"] == len(nats)
    assert measured["loss"] == pytest.approx(np.mean(nats), abs=1e-5)
    for suffix, own in hits.items():
        assert measured[f"recall{suffix}"] == pytest.approx(np.mean(own))
        for name, members in groups.items():
            expected = np.mean([own[i] for i in members])
            assert measured[f"recall_{name}{suffix}"] == pytest.approx(expected)
            assert measured[f"recall_{name}_items"] == len(members)
    assert measured["recall_items"] == len(nats)
    assert measured["recall_chance"] == 1 / 3
    assert sum(name.endswith("_back_items") for name in measured) == sum(
        "back" in g for g in groups
    )


def two():
    of = experiment()
    return experiment(resources={"workers": 2, "microbatch_tokens": 2 * of.model.block_size})


def worker(rank, path):
    of = two()
    stepper = TrainStepper(GPT(of.model, seed=0).double(), uneven(of), of, seed=0)
    stepper.connect_workers()
    loss = stepper.accumulate_gradient(0).item()
    if rank == 0:
        gradient = torch.cat([p.grad.flatten() for p in stepper.model.parameters()])
        path.write_text(json.dumps([loss, stepper.validation_loss(), *gradient.tolist()]))
    else:
        stepper.validation_loss()


def test_two_workers_weigh_by_their_answers(tmp_path):
    path = tmp_path / "found.json"
    run_two(__name__, worker, path)
    loss, validation, *gradient = json.loads(path.read_text())
    of = two()
    x, y = step_batch(of, uneven(of))
    alone = experiment()
    stepper = TrainStepper(GPT(of.model, seed=0).double(), uneven(of), alone, seed=0)
    counts = [stepper.loss.count_targets(part) for part in y.split(4)]
    assert counts[0] != counts[1]
    expected = plain_loss(of, stepper.model, x, y)
    expected.backward()
    plain = torch.cat([p.grad.flatten() for p in stepper.model.parameters()])
    assert abs(loss - expected.item()) < 1e-6
    assert (torch.tensor(gradient, dtype=torch.float64) - plain).abs().max() < 1e-10
    assert abs(validation - stepper.validation_loss()) < 1e-6
