import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvlab.data.batches import spread_windows
from kvlab.evaluate.evaluation import measure_probes
from kvlab.evaluate.probes import make_recall_rows, recall_measurements, score_recall
from kvlab.evaluate.validation_loss import position_losses, position_measurements
from kvlab.model import GPT
from kvlab.spec import ModelConfig, ServingConfig
from kvlab.store.metrics import METRICS
from tests.support.random_model import random_model
from tests.support.tiny_training import experiment

SHAPE = {"vocab_size": 258, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
SERVING = ServingConfig()
TEXT = np.random.default_rng(5).integers(0, 256, 2000).astype(np.uint16)


def ignore(*_):
    pass


def loud(**changes):
    return random_model(ModelConfig(**{**SHAPE, **changes}), dtype=torch.float32).eval()


def test_rows_are_pairs_and_then_the_keys_again():
    rows = make_recall_rows(5, 32, 256)
    assert rows.tokens.shape == (5, 32)
    assert rows.pairs == 8
    for tokens, values, answers, distances in zip(
        rows.tokens, rows.values, rows.answers, rows.distances, strict=True
    ):
        pairs = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
        assert len({*tokens[:16]}) == 16, "no token twice among keys and values"
        repeated = list(zip(tokens[16::2], tokens[17::2], strict=True))
        assert sorted(repeated) == sorted(pairs.items())
        assert [values[a] for a in answers] == [pairs[key] for key, _ in repeated]
        for position, distance, (key, _) in zip(rows.positions, distances, repeated, strict=True):
            assert tokens[position] == key
            assert tokens[position - distance] == pairs[key]
    assert len({tuple(row) for row in rows.tokens}) == 5
    assert (make_recall_rows(2, 32, 256).tokens == rows.tokens[:2]).all(), "a row is its number's"
    assert make_recall_rows(1, 1024, 20).pairs == 10, "as many as there are words"


def test_recall_is_the_best_of_the_rows_values():
    model, rows = loud(), make_recall_rows(40, 32, 256)
    right = score_recall(model, rows, None, ignore)
    logits = model(torch.from_numpy(rows.tokens)).detach()
    for r in range(40):
        for i, position in enumerate(rows.positions):
            scores = [float(logits[r, position, value]) for value in rows.values[r]]
            assert right[r, i] == (scores.index(max(scores)) == rows.answers[r, i])
    assert 0 < right.mean() < 0.5, "weights that learnt nothing guess"
    measurements = recall_measurements(rows, right, "_served")
    far = [right[r, i] for r in range(40) for i in range(8) if rows.distances[r, i] > 16]
    near = [right[r, i] for r in range(40) for i in range(8) if rows.distances[r, i] <= 8]
    assert measurements == pytest.approx({
        "recall_acc_served": right.mean(),
        "recall_acc_far_served": np.mean(far),
        "recall_acc_near_served": np.mean(near),
    })  # fmt: skip


def test_loss_by_position_is_the_loss_of_each_place():
    model = loud(position="rope")
    scored = spread_windows(TEXT, 130, 64)
    losses = position_losses(model, scored, None, ignore)
    rows = np.stack([TEXT[start : start + 65] for start in scored.starts]).astype(np.int64)
    text = torch.from_numpy(rows)
    logits = model(text[:, :-1]).detach()
    nats = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")
    expected = nats.view(3, 64).mean(0)
    assert losses == pytest.approx(expected.numpy(), abs=1e-5)
    measurements = position_measurements(losses, 32, "")
    assert measurements["loss_part1"] == pytest.approx(float(expected[:4].mean()), abs=1e-5)
    assert measurements["loss_part8"] == pytest.approx(float(expected[28:32].mean()), abs=1e-5)
    assert measurements["loss_beyond"] == pytest.approx(float(expected[32:].mean()), abs=1e-5)


@pytest.mark.parametrize(("position", "served"), [("learned", True), ("rope", False)])
def test_probes_are_measured_as_asked(position, served):
    evaluation = {"loss_tokens": 96, "served": served, "recall": 4, "positions": True}
    of = experiment({**SHAPE, "position": position}, evaluation=evaluation)
    counted = []

    def progress(note, tokens):  # noqa: ARG001
        counted.append(-tokens)
        return counted.append

    measurements, _ = measure_probes(GPT(of.model), TEXT, of, progress)
    assert set(measurements) <= set(METRICS)
    assert sum(counted) == 0, "progress reaches its end"
    assert ("loss_beyond" in measurements) == (position == "rope")
    assert ("recall_acc_served" in measurements) == ("loss_part8_served" in measurements) == served
    assert measurements["recall_rows"] == 4
    plain = of.model_copy(update={"evaluation": type(of.evaluation)()})
    assert measure_probes(GPT(of.model), TEXT, plain, progress) == ({}, [])
