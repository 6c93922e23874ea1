"""Documents packed into a row are computed as if each stood alone."""

import pytest
import torch

from kvlab.model.loss import summed_loss
from kvlab.spec import ModelConfig
from tests.support.random_model import random_model

START = 40
LENGTHS = [(3, 1, 13, 7, 16), (40,), (1, 1, 30, 8)]
"""Tokens of each document in three rows of 40."""

SHAPES = [
    {"position": "learned"},
    {"position": "rope", "n_kv_head": 2, "attention_pattern": "GL", "window": 5},
    {"position": "none", "kv_sharing": "adjacent:2", "n_kv_head": 1},
]


def packed_tokens():
    """Rows (3, 40); the first document of the second row began in the window before."""
    torch.manual_seed(2)
    tokens = torch.randint(0, START, (3, 40))
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            tokens[row, start] = START
            start += length
    tokens[1, 0] = 7
    return tokens


def iter_documents(tokens):
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            yield row, slice(start, start + length), tokens[row : row + 1, start : start + length]
            start += length


def make_model(shape, dtype=torch.float64):
    sizes = {"vocab_size": 41, "block_size": 40, "n_layer": 4, "n_head": 4, "n_embd": 32}
    return random_model(ModelConfig(**{**sizes, **shape}), dtype=dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_document_and_its_gradients_are_computed_as_if_alone(shape):
    check_documents(shape)


def check_documents(shape):
    model_packed, model_alone, tokens = make_model(shape), make_model(shape), packed_tokens()
    targets = tokens.roll(-1, 1)
    hidden = model_packed.hidden_states(tokens, document_start=START)
    summed_loss(hidden, model_packed.lm_head.weight, targets).backward()
    for row, columns, document in iter_documents(tokens):
        alone = model_alone.hidden_states(document)
        assert (hidden[row, columns] - alone[0]).abs().max() < 1e-10
        head, document_targets = model_alone.lm_head.weight, targets[row : row + 1, columns]
        summed_loss(alone, head, document_targets).backward()
    if shape["position"] != "none":
        plain = model_alone.hidden_states(tokens)
        assert (hidden - plain).abs().max() > 0.1, "the mask changes something"
    for ours, theirs in zip(model_packed.parameters(), model_alone.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-9


def test_a_cache_holds_one_document_a_row():
    model = make_model(SHAPES[0])
    with pytest.raises(ValueError, match="give each document its own row"):
        model.hidden_states(packed_tokens(), model.new_cache(3, 40), document_start=START)
