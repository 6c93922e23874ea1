"""What serving changes in the distribution of the next token, against plain float64."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kvlab.data.batches import spread_windows
from kvlab.evaluate import evaluate
from kvlab.evaluate.validation_loss import compare_serving, kl_divergence
from kvlab.spec import Experiment, ModelConfig, ServingConfig
from kvlab.store.metrics import METRICS
from tests.support.random_model import random_model

SHAPE = {"vocab_size": 61, "block_size": 16, "n_layer": 4, "n_head": 2, "n_embd": 16}
TEXT = np.random.default_rng(3).integers(0, 61, 400).astype(np.uint16)
SCORED = spread_windows(TEXT, 80, 16)
TIE = {"tie": "adjacent:2", "tie_rule": "owner"}


def exact_kl(logits, change):
    p, q = (x.double().log_softmax(-1) for x in (logits, logits.double() + change.double()))
    return F.kl_div(q, p, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("scale", [1e-5, 0.1, 3.0, 300.0])
def test_small_and_large_divergences_are_those_of_float64(scale):
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(64, 500, generator=generator)
    change = scale * torch.randn(64, 500, generator=generator)
    expected = exact_kl(logits, change)
    divergence = kl_divergence(logits, change.clone())
    assert divergence.dtype == torch.float64
    assert divergence.numpy() == pytest.approx(expected.numpy(), rel=2e-3)
    assert kl_divergence(logits, torch.full_like(logits, 7.0)).abs().max() < 1e-11


def by_hand(model, windows, serving):
    """KL and changed top tokens (windows, 16), one row of cache and one token at a time."""
    divergences, changes = [], []
    for start in spread_windows(TEXT, windows * 16, 16).starts:
        x = torch.from_numpy(TEXT[start : start + 16].astype(np.int64))
        cache = model.new_cache(1, 16, serving)
        with torch.no_grad():
            one_shot = model(x[None])[0]
            served = torch.cat([model(token.view(1, 1), cache=cache)[0] for token in x])
        divergences.append(exact_kl(one_shot, served - one_shot))
        changes.append(one_shot.argmax(-1) != served.argmax(-1))
    return torch.stack(divergences).numpy(), torch.stack(changes).double().numpy()


@pytest.mark.parametrize(
    ("shape", "serving"),
    [
        ({}, {**TIE, "tie_rule": "overwrite"}),
        ({"n_kv_head": 1, "attention_pattern": "GL", "window": 5}, {"kv_dtype": "int8"}),
        ({"position": "rope"}, {"kv_dtype": "fp8"}),
    ],
)
def test_divergence_is_that_of_every_token_alone(shape, serving):
    model, how = random_model(ModelConfig(**{**SHAPE, **shape})), ServingConfig(**serving)
    kl, changed = by_hand(model, 5, how)
    compared = compare_serving(model, SCORED, how)
    assert compared.by_window[0] == pytest.approx(kl.mean(1), rel=1e-9)
    assert compared.by_window[1] == pytest.approx(changed.mean(1))
    if "tie" in serving:
        by_position = compared.by_position[0]
        assert by_position[0] < 1e-20 < 1e-3 < by_position[1:].min(), "none at the first token"
    measured = compared.measurements()
    assert measured["serving_kl"] == pytest.approx(kl.mean())
    assert measured["serving_kl_stderr"] == pytest.approx(kl.mean(1).std(ddof=1) / math.sqrt(5))
    assert measured["serving_top_changed"] == pytest.approx(changed.mean())
    for part in range(8):
        places = slice(2 * part, 2 * part + 2)
        assert measured[f"serving_kl_part{part + 1}"] == pytest.approx(kl[:, places].mean())
        assert measured[f"serving_top_changed_part{part + 1}"] == pytest.approx(
            changed[:, places].mean()
        )


def experiment(**sections):
    return Experiment(
        name="small", model={**SHAPE, "vocab_size": 257},
        data={"tokenizer": "bytes", **sections.pop("data", {})},
        benchmark={"prompt_tokens": 4, "new_tokens": 4},
        evaluation={"loss_tokens": 64, **sections.pop("evaluation", {})}, serving=TIE, **sections,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, {"kl", "top_changed", "kl_stderr", "kl_part1", "top_changed_part8"}),
        ({"data": {"mask_documents": True}}, {"kl", "top_changed_stderr"}),
        ({"evaluation": {"served_tokens": 16}}, {"kl", "kl_part8"}),
        ({"evaluation": {"served": False}}, set()),
    ],
)
def test_an_evaluation_measures_it_wherever_it_serves(changes, names):
    of = experiment(**changes)
    data = SimpleNamespace(validation=TEXT)
    measured = set(evaluate(random_model(of.model), data, of).measurements)
    assert measured <= set(METRICS)
    assert {f"serving_{name}" for name in names} <= measured
    assert any("part1" in name for name in measured) == any("part" in name for name in names)
    assert any("stderr" in name for name in measured) == any("stderr" in name for name in names)


def test_one_shot_reads_what_training_read_so_that_its_own_cache_has_no_gap():
    trained = {"kv_dtype": "int4", "kv_group": 8}
    measured = {}
    for name, serving in (("same", trained), ("float", {}), ("other", {"kv_dtype": "int8"})):
        of = experiment(training=trained)
        of = of.model_copy(update={"serving": ServingConfig(**serving)})
        model = random_model(of.model)
        measured[name] = evaluate(model, SimpleNamespace(validation=TEXT), of).measurements
    assert abs(measured["same"]["serving_gap"]) < 1e-9 < 1e-6 < measured["same"]["loss"]
    assert abs(measured["float"]["serving_gap"]) > 1e-4
    exact = measured["float"]["loss_served"]
    change = measured["same"]["kv_dtype_loss_change"]
    assert measured["same"]["loss"] - exact == pytest.approx(change, abs=1e-9)
    assert measured["other"]["loss"] == pytest.approx(measured["same"]["loss"], abs=1e-12)
