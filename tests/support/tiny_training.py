"""A training of about a second, and the tokens for it."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvlab.model import GPT
from kvlab.spec import Experiment

MODEL = {"vocab_size": 258, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
TRAINING = {
    "tokens": 64 * 24, "batch_tokens": 64, "learning_rate": 1e-2, "evaluate_every": 5,
    "evaluate_tokens": 64, "checkpoint_every": 4,
}  # fmt: skip


def experiment(model=(), training=(), **parts):
    return Experiment(
        name="small", model={**MODEL, **dict(model)}, data={"tokenizer": "bytes"},
        training={**TRAINING, **dict(training)}, benchmark={"prompt_tokens": 4, "new_tokens": 4},
        **parts,
    )  # fmt: skip


def dataset(count=4000):
    """Tokens in which the next one follows from the last two, so that there is much to learn."""
    rng = np.random.default_rng(7)
    tokens = [1, 2]
    for noise in rng.random(count):
        tokens.append((tokens[-1] * 3 + tokens[-2]) % 40 if noise > 0.05 else int(noise * 800))
    array = np.array(tokens, dtype=np.uint16)
    return SimpleNamespace(train=array[: -count // 4], validation=array[-count // 4 :])


def assert_same_losses(one, other, tolerance):
    """Check the curves of two records, point by point."""
    for name in ("train_curve", "validation_curve"):
        for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
            assert a == pytest.approx(b, abs=tolerance)


def model(of, seed=0):
    return GPT(of.model, seed=seed)
