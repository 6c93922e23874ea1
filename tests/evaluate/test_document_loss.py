"""Loss where attention ends with each document, one-shot and through the serving cache."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvlab.data.batches import spread_windows
from kvlab.evaluate.validation_loss import compare_serving, target_losses
from kvlab.spec import ServingConfig
from tests.model.test_document_mask import START, make_model, packed_tokens
from tests.support.compiled_steps import watch_compiled_steps

SHAPE = {"position": "rope", "n_kv_head": 2, "attention_pattern": "GL", "window": 5}
MODEL = make_model(SHAPE, torch.float32).eval()
TEXT = np.concatenate([*packed_tokens().numpy(), [3]])
PACKED = spread_windows(TEXT, 120, 40)
SCORED = replace(PACKED, document_start=START)


def by_hand():
    """Mean nats of windows of 40: each document alone, a token at a time, from position 0."""
    means = []
    for first in range(0, 120, 40):
        window, losses, document = TEXT[first : first + 41], [], []
        for token, target in itertools.pairwise(window):
            document = [token] if token == START else [*document, token]
            with torch.no_grad():
                logits = MODEL(torch.tensor([document]))[0, -1].log_softmax(-1)
            losses.append(-float(logits[target]))
        means.append(np.mean(losses))
    return means


def test_one_shot_and_served_losses_are_those_of_documents_alone():
    expected = pytest.approx(by_hand(), abs=1e-5)
    assert target_losses(MODEL, SCORED, None).mean(1) == expected
    served = target_losses(MODEL, SCORED, ServingConfig()).mean(1)
    assert served == expected
    packed = target_losses(MODEL, PACKED, None).mean(1)
    assert packed != expected, "packed text differs"


def test_documents_of_all_sizes_have_one_compiled_step(monkeypatch):
    """It is compiled anew for each size of its cache."""
    sizes = watch_compiled_steps(monkeypatch)
    for text in (SCORED, PACKED):
        sizes.clear()
        expected = target_losses(MODEL, text, ServingConfig())
        served = target_losses(MODEL, text, ServingConfig(compile=True))
        assert np.abs(served - expected).max() < 1e-5
        assert sizes == {(3, 40)}


def test_a_coarse_cache_is_compared_document_by_document():
    serving = ServingConfig(kv_dtype="float16")
    comparison = compare_serving(MODEL, SCORED, serving)
    assert comparison.exact.mean(1) == pytest.approx(by_hand(), abs=1e-5)
    assert 0 < comparison.logit_rms < 0.1
