import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvlab.evaluate import evaluate, evaluation
from tests.support import tiny_training
from tests.support.random_model import random_model

MODEL = {"vocab_size": 257, "n_layer": 4}
TEXT = np.random.default_rng(3).integers(0, 257, 2000).astype(np.uint16)
DATA = SimpleNamespace(validation=TEXT)


def experiment(model=(), serving=(), **evaluation):
    evaluation = {"loss_tokens": 160, **evaluation}
    return tiny_training.experiment(
        {**MODEL, **dict(model)}, serving=dict(serving), evaluation=evaluation
    )


def window_starts(windows, of=None):
    """Return the starts of windows spread over the text, or over ``of`` windows spread so."""
    places = [index * 124 // (of or windows) for index in range(of or windows)]
    return [16 * places[index * len(places) // windows] for index in range(windows)]


def window_loss(model, windows, served=None, of=None):
    """Ten lines: plain forwards, or a cache of one row fed token by token."""
    text = torch.from_numpy(TEXT.astype(np.int64))
    losses = []
    for start in window_starts(windows, of):
        x, y = text[start : start + 16], text[start + 1 : start + 17]
        logits = model(x[None])[0]
        if served is not None:
            cache = model.new_cache(1, 16, served)
            logits = torch.cat([model(token.view(1, 1), cache=cache)[0] for token in x])
        losses.append(F.cross_entropy(logits, y).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize("shape", [{}, {"n_kv_head": 1, "attention_pattern": "GL", "window": 5}])
def test_an_untied_cache_has_no_gap(shape):
    of = experiment(model=shape)
    model = random_model(of.model, dtype=torch.float32)
    measurements = evaluate(model, DATA, of).measurements
    assert measurements["loss"] == pytest.approx(window_loss(model, 10), rel=1e-5)
    scored = [target for start in window_starts(10) for target in TEXT[start + 1 : start + 17]]
    text_bytes = sum(target < 256 for target in scored)  # the end of text has none
    assert text_bytes < 160
    bits = 160 * measurements["loss"] / math.log(2) / text_bytes
    assert measurements["bits_per_byte"] == pytest.approx(bits)
    assert measurements["loss_tokens"] == measurements["served_tokens"] == 160
    assert abs(measurements["serving_gap"]) < 1e-5
    assert not [name for name in measurements if name.startswith("kv_dtype")]


def test_progress_says_which_token_is_decoded(monkeypatch):
    monkeypatch.setattr(evaluation, "REPORT_SECONDS", 0.0)
    of, updates = experiment(), []
    evaluate(random_model(of.model, dtype=torch.float32), DATA, of, on_progress=updates.append)
    places = [one["note"].rpartition(", ")[2] for one in updates if "served" in one["note"]]
    assert [one for one in places if one.startswith("token")] == [
        f"token {number} of 16" for number in range(1, 17)
    ]


@pytest.mark.parametrize("rule", ["overwrite", "owner"])
def test_tying_shows_in_the_served_loss_alone(rule):
    of = experiment(serving={"tie": "adjacent:2", "tie_rule": rule}, served_tokens=64)
    model = random_model(of.model, dtype=torch.float32)
    measurements = evaluate(model, DATA, of).measurements
    assert measurements["loss"] == pytest.approx(window_loss(model, 10), rel=1e-5)
    served, one_shot = (window_loss(model, 4, how, of=10) for how in (of.serving, None))
    assert measurements["loss_served"] == pytest.approx(served, rel=1e-5)
    assert measurements["serving_gap"] == pytest.approx(served - one_shot, abs=1e-5)
    assert abs(measurements["serving_gap"]) > 1e-2
    assert measurements["served_tokens"] == 64
    alone = evaluate(model, DATA, experiment(served=False)).measurements
    assert set(alone) == {"loss", "loss_tokens", "bits_per_byte"}
    assert alone["loss"] == measurements["loss"], "bitwise"


def test_more_served_tokens_than_loss_tokens():
    of = experiment(loss_tokens=32, served_tokens=81, serving={"kv_dtype": "float32"})
    model = random_model(of.model, dtype=torch.float32)
    measurements = evaluate(model, DATA, of).measurements
    assert (measurements["loss_tokens"], measurements["served_tokens"]) == (32, 96)
    assert measurements["loss"] == pytest.approx(window_loss(model, 2, of=6), rel=1e-5)
    assert measurements["loss_served"] == pytest.approx(window_loss(model, 6), rel=1e-5)
    assert abs(measurements["serving_gap"]) < 1e-5
    assert "kv_dtype_loss_change" not in measurements, "float32 is the model's own"


def test_losses_are_recorded_by_document():
    of = experiment(serving={"tie": "adjacent:2"}, served_tokens=64)
    model = random_model(of.model, dtype=torch.float32)
    text = TEXT.copy()
    text[::37] = 256
    evaluation = evaluate(model, SimpleNamespace(validation=text), of)
    sums = {}
    for start in window_starts(10):
        window = torch.from_numpy(text[start : start + 17].astype(np.int64))
        losses = F.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none")
        for place, loss in enumerate(losses.tolist(), start + 1):
            document = int((text[: place + 1] == 256).sum()) - 1
            tokens, nats = sums.get(document, (0, 0.0))
            sums[document] = tokens + 1, nats + loss
    columns = evaluation.details["texts"]["loss"]
    assert columns["documents"] == sorted(sums)
    assert columns["tokens"] == [sums[document][0] for document in sorted(sums)]
    assert columns["nats"] == pytest.approx([sums[document][1] for document in sorted(sums)])
    served, measured = evaluation.details["texts"]["served"], evaluation.measurements
    assert sum(columns["nats"]) / 160 == pytest.approx(measured["loss"])
    assert sum(served["tokens"]) == 64
    assert sum(served["nats"]) / 64 == pytest.approx(measured["loss_served"])
    gap = (sum(served["nats"]) - sum(served["one_shot_nats"])) / 64
    assert gap == pytest.approx(measured["serving_gap"])


def test_bytes_to_score_give_the_loss_of_whole_documents():
    of = experiment(loss_tokens=65_536, loss_bytes=150, serving={"tie": "adjacent:2"})
    model = random_model(of.model, dtype=torch.float32)
    text = TEXT % 256
    text[::37] = 256
    evaluation = evaluate(model, SimpleNamespace(validation=text), of)
    documents = evaluation.details["texts"]["loss"]["documents"]
    stream = np.concatenate([text[37 * d : 37 * d + 37] for d in documents]).astype(np.int64)
    losses = []
    for place in range(1, len(stream)):
        # windows of 16 from the first document's start; the last one ends with the text
        start = min((place - 1) // 16 * 16, len(stream) - 17)
        x = torch.from_numpy(stream[start:place])
        losses.append(F.cross_entropy(model(x[None])[0, -1], torch.tensor(stream[place])).item())
    measured = evaluation.measurements
    assert measured["loss_tokens"] == measured["served_tokens"] == len(losses) == 37 * 5 - 1
    assert measured["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    bits = sum(losses) / math.log(2) / (36 * 5)
    assert measured["bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert sum(evaluation.details["texts"]["served"]["tokens"]) == len(losses)
    coarse = experiment(loss_tokens=65_536, loss_bytes=150,
                        serving={"tie": "adjacent:2", "kv_dtype": "int8"})  # fmt: skip
    of_int8 = evaluate(model, SimpleNamespace(validation=text), coarse).measurements
    change = of_int8["loss_served"] - measured["loss_served"]
    assert of_int8["kv_dtype_loss_change"] == pytest.approx(change, rel=1e-4)


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_what_a_coarse_cache_costs_is_told_apart_from_what_a_tie_costs(kind):
    tie = {"tie": "adjacent:2", "tie_rule": "owner"}
    of = experiment(serving={**tie, "kv_dtype": kind}, served_tokens=48)
    model = random_model(of.model, dtype=torch.float32)
    measurements = evaluate(model, DATA, of).measurements
    exact = of.serving.model_copy(update={"kv_dtype": "model"})
    losses = [window_loss(model, 3, how, of=10) for how in (of.serving, exact)]
    assert measurements["kv_dtype_loss_change"] == pytest.approx(losses[0] - losses[1], abs=2e-5)
    errors = logit_errors(model, 3, of.serving, exact)
    assert measurements["kv_dtype_logit_rms"] == pytest.approx(
        errors.square().mean().sqrt().item(), rel=1e-3
    )
    assert measurements["kv_dtype_logit_largest"] == pytest.approx(
        errors.abs().max().item(), rel=1e-3
    )
    assert measurements["kv_dtype_logit_rms"] > 1e-4
    assert abs(measurements["serving_gap"]) > 10 * abs(measurements["kv_dtype_loss_change"])


def logit_errors(model, windows, coarse, exact):
    text = torch.from_numpy(TEXT.astype(np.int64))
    differences = []
    for start in window_starts(windows, of=10):
        caches = [model.new_cache(1, 16, how) for how in (coarse, exact)]
        for token in text[start : start + 16]:
            first, second = (model(token.view(1, 1), cache=cache) for cache in caches)
            differences.append((first - second).detach())
    return torch.cat(differences)
