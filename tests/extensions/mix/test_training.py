"""Training and measuring a mix: its loss is that of its sources, and recall is that of recall."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvlab.data.bigram_table import score_tables
from kvlab.data.dataset_preparation import prepare_dataset
from kvlab.data.tokenizers import load_tokenizer
from kvlab.evaluate import evaluate, evaluation
from kvlab.evaluate.evaluation import select_scored_text
from kvlab.evaluate.hellaswag import hellaswag_measurements, score_hellaswag
from kvlab.extensions.recall.accuracy import measure_recall
from kvlab.model import GPT
from kvlab.train.train_step import TrainStepper, WorkerGroup
from tests.data.conftest import data_home  # noqa: F401
from tests.extensions.mix.mixes import LENGTH, SYMBOLS, experiment, write_texts
from tests.extensions.recall.recalls import read_document
from tests.support.hellaswag_items import ITEMS
from tests.support.random_model import random_model


@pytest.fixture
def paths(tmp_path):
    return write_texts(tmp_path, "one")


def plain_losses(model, data, of, starts):
    """Return the nats of each source's targets, in PyTorch's own words."""
    nats, first = {"files": [], "recall": []}, of.data.vocabulary.size
    answers = of.data.recall.target_ids
    block = of.model.block_size
    for start in starts:
        row = torch.from_numpy(data[start : start + block + 1].astype(np.int64))
        losses = F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="none")
        if start < data.part_tokens[0]:
            nats["files"] += losses.tolist()
        else:
            is_answer = torch.tensor([int(one) - first in answers for one in row[1:]])
            nats["recall"] += losses[is_answer].tolist()
    return nats


@pytest.mark.parametrize(("tokenizer", "ranks"), [("bytes", 256), ("gpt2:300", 300)])
def test_the_losses_of_the_sources_are_those_of_a_loop_and_sum_to_the_whole(
    paths, tokenizer, ranks
):
    shape = {"vocab_size": ranks + 1 + SYMBOLS + 1}
    of = experiment(
        paths, data={"tokenizer": tokenizer}, model=shape,
        evaluation={"loss_tokens": 60 * LENGTH, "served_tokens": 24 * LENGTH},
        serving={"tie": "adjacent:2"},
    )  # fmt: skip
    data, model = prepare_dataset(of.data, workers=1), random_model(of.model)
    text, served = select_scored_text(data.validation, of)
    assert (len(text), len(served)) == (60, 24)
    measured = evaluate(model, data, of).measurements
    nats = plain_losses(model, data.validation, of, text.starts.tolist())
    for source, own in nats.items():
        assert measured[f"loss_{source}"] == pytest.approx(np.mean(own), abs=1e-5)
        assert measured[f"loss_{source}_tokens"] == len(own)
    assert measured["loss"] == pytest.approx(np.mean(nats["files"] + nats["recall"]), abs=1e-5)
    for suffix, number in (("", "loss_tokens"), ("_served", "served_tokens")):
        tokens = {source: measured[f"loss_{source}{suffix}_tokens"] for source in nats}
        total = sum(measured[f"loss_{source}{suffix}"] * n for source, n in tokens.items())
        assert sum(tokens.values()) == measured[number]
        assert total / measured[number] == pytest.approx(measured[f"loss{suffix}"], rel=1e-9)
    assert measured["loss_files_served_tokens"] == 18 * LENGTH
    assert not [name for name in measured if name.startswith("bits_per_byte")]


def test_recall_is_that_of_its_own_windows(paths):
    of = experiment(paths, share=0.5)
    data, model = prepare_dataset(of.data, workers=1), random_model(of.model)
    _, served = select_scored_text(data.validation, of)
    first, right, near = of.data.vocabulary.size, [], []
    for start in served.starts[served.window_parts == 1].tolist():
        row = data.validation[start : start + LENGTH].astype(int)
        shown, asked = read_document(of.data.recall, (row[1:] - first).tolist())
        logits = model(torch.from_numpy(row[None]))[0]
        for key, _, place in asked:
            right.append(int(logits[place].argmax()) == row[1 + place])
            near.append(place - 1 - {k: p for k, _, p in shown}[key] <= 8)
    measured = evaluate(model, data, of).measurements
    assert measured["recall_items"] == len(right) == 20 * 4
    assert measured["recall"] == pytest.approx(np.mean(right))
    assert measured["recall_8_back_items"] + measured.get("recall_4_back_items", 0) == sum(near)
    assert measured["recall_chance"] == 1 / 3
    alone = experiment(paths, data={"mix": None, "source": "files", "recall": None})
    assert not measure_recall(model, data.validation, alone, None).measurements


def test_hellaswag_is_scored_with_the_ids_of_text(paths, monkeypatch):
    monkeypatch.setattr(evaluation, "load_hellaswag", lambda count: ITEMS[:count])
    of = experiment(
        paths, model={"block_size": 4 * LENGTH},
        evaluation={"loss_tokens": 20 * LENGTH, "hellaswag": 3},
    )  # fmt: skip
    data, model = prepare_dataset(of.data, workers=1), random_model(of.model)
    measured = evaluate(model, data, of).measurements
    plain = score_hellaswag(model, ITEMS[:3], load_tokenizer("bytes"), of.serving)
    for name, value in hellaswag_measurements(plain).items():
        assert measured[name] == value


def test_a_mix_of_texts_keeps_its_bits_per_byte(paths, tmp_path, monkeypatch):
    from kvlab.spec.data_config import SOURCES
    from tests.extensions.mix import other_source

    monkeypatch.setattr(other_source, "PATHS", write_texts(tmp_path / "others", "one", "two")[1:])
    monkeypatch.setitem(SOURCES, "others", other_source.ENTRY)
    of = experiment(paths, data={"mix": {"files": 0.5, "others": 0.5}, "recall": None})
    data = prepare_dataset(of.data, workers=1)
    measured = evaluate(random_model(of.model), data, of).measurements
    bits = measured["loss"] * measured["loss_tokens"] / np.log(2)
    text, _ = select_scored_text(data.validation, of)
    characters = int((text.targets() < 256).sum())
    assert measured["bits_per_byte"] == pytest.approx(bits / characters)
    assert measured["loss_others_tokens"] == measured["loss_files_tokens"]


def test_the_floor_is_over_the_targets_of_the_loss(paths):
    of = experiment(paths, share=0.5)
    data = prepare_dataset(of.data, workers=1)
    scored, _ = select_scored_text(data.validation, of)
    tables = score_tables(
        data.train, scored, seed=0, windows=600, vocab_size=of.data.vocab_size,
        parts=of.data.parts,
    )  # fmt: skip
    pairs = scored.select(np.flatnonzero(scored.window_parts == 1))
    own = score_tables(
        data.train, pairs, seed=0, windows=600, vocab_size=of.data.vocab_size,
        parts=of.data.parts,
    )  # fmt: skip
    assert own["loss_bigram"] == pytest.approx(np.log(3), abs=0.1), "a guess among 3 values"
    assert own["loss_bigram"] < tables["loss_bigram"] < tables["loss_unigram"]


def test_a_step_is_the_mean_over_its_targets_and_workers_read_what_one_reads(paths):
    of = experiment(paths)
    data = prepare_dataset(of.data, workers=1)
    stepper = TrainStepper(GPT(of.model, seed=0).double(), data, of, seed=1)
    x, y = stepper._read_batch(0)
    loss = stepper.accumulate_gradient(0)
    starts = [
        start
        for start in range(len(data.train) - LENGTH)
        if (data.train[start : start + LENGTH] == x.numpy()).all(1).any()
    ]
    assert len(starts) >= len(x) - 1
    chosen = [one for ids in of.data.target_ids for one in ids]
    masked = torch.where(torch.isin(y, torch.tensor(chosen)), y, -100)
    expected = F.cross_entropy(stepper.model(x).flatten(0, 1), masked.flatten())
    assert abs(loss.item() - expected.item()) < 1e-6
    halves = []
    for rank in range(2):
        stepper.workers = WorkerGroup(rank, 2)
        halves.append(stepper._read_batch(0)[0])
    assert (torch.cat(halves) == x).all()
