"""The loss by position in the context."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvlab.data.batches import spread_windows
from kvlab.evaluate.evaluation import measure_positions
from kvlab.evaluate.validation_loss import position_measurements, target_losses
from kvlab.model import GPT
from kvlab.spec import ModelConfig
from kvlab.store.metrics import METRICS
from tests.support.random_model import random_model
from tests.support.tiny_training import experiment

SHAPE = {"vocab_size": 258, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 16}
TEXT = np.random.default_rng(5).integers(0, 256, 2000).astype(np.uint16)


def test_loss_by_position_is_the_loss_of_each_place():
    model = random_model(ModelConfig(**SHAPE, position="rope"), dtype=torch.float32).eval()
    scored = spread_windows(TEXT, 130, 64)
    losses = target_losses(model, scored, None).mean(0)
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
def test_it_is_measured_as_asked(position, served):
    evaluation = {"loss_tokens": 96, "served": served, "positions": True}
    evaluation |= {"served_tokens": 64} if served else {}
    of = experiment({**SHAPE, "position": position}, evaluation=evaluation)
    counted = []

    def progress(note, tokens):  # noqa: ARG001
        counted.append(-tokens)
        return SimpleNamespace(advance=lambda count, *_: counted.append(count), keep=map)

    measurements = measure_positions(GPT(of.model), TEXT, of, progress)
    assert set(measurements) <= set(METRICS)
    assert sum(counted) == 0, "progress reaches its end"
    assert counted[0] == -128, "64 tokens one-shot and served, or two windows of twice the block"
    assert ("loss_beyond" in measurements) == (position == "rope")
    assert ("loss_part8_served" in measurements) == served
    plain = of.model_copy(update={"evaluation": type(of.evaluation)()})
    assert measure_positions(GPT(of.model), TEXT, plain, progress) == {}
